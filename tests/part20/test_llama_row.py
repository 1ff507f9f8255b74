"""The chain for one row of Llama or Qwen3 gives the logits of the model's own forward pass, and its keys."""

import pytest
import torch

pytest.importorskip("triton", reason="needs the package triton")

from engine.kernels import llama_row
from engine.kernels.llama_row import MIN_HEAD_DIM_OF_HALVES, LlamaRow
from engine.kernels.tiles import Tile
from tests.part13.test_many_rows import TOLERANCE, Step
from tests.part13.test_paged_attention import DEVICE
from tests.part20.test_llama_rows import MODELS, made

TILES = llama_row.TILES
NARROW = [name for name, (_, settings) in MODELS.items() if settings["head_dim"] < MIN_HEAD_DIM_OF_HALVES]


@pytest.fixture(scope="module", params=[name for name in MODELS if name not in NARROW])
def model(request, tmp_path_factory):
    return made(*MODELS[request.param], tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def wide_tiles(monkeypatch):
    """In the interpreter few programs, as Part 13's tests have them; the same layers walk over tiles."""
    if DEVICE == "cpu":
        walks = {"qkv": Tile(16, 4, 2), "gate_up": Tile(32, 4, 1)}
        monkeypatch.setattr(llama_row, "TILES", dict.fromkeys(llama_row.TILES, Tile(16, 4, None)) | walks)


@pytest.mark.parametrize(("length", "runs"), [(1, 1), (70, 2)])
def test_logits_and_stored_keys_are_the_models(model, length, runs):
    """A second run over the same buffers: nothing is left behind by the first. 70 tokens are two parts."""
    step = Step(model, [length])
    memory = step.memory.clone()
    chain = LlamaRow(model, list(memory[0]), list(memory[1]))
    with torch.inference_mode():
        logits, stored = step.want()
        for _ in range(runs):
            got = chain(step.token_ids, step.positions, step.slots, step.tables, step.context)
            assert torch.allclose(got, logits, atol=TOLERANCE), "the chain's logits are the model's"
            assert not chain.arrived.any(), "after each run the counts of parts are back at 0"
    assert torch.allclose(memory, stored, atol=1e-5), "the new token's key and value lie in its slot"


def test_a_wide_layer_has_more_threads_and_then_fewer_rows(monkeypatch):
    """A thread holds weights of its tile in registers, of which it has 255."""
    monkeypatch.setattr(llama_row, "TILES", TILES)
    assert llama_row.tile_of("gate_up", 1024) == TILES["gate_up"], "Qwen3-0.6B: as it was tuned"
    assert llama_row.tile_of("gate_up", 4096)[:2] == (4, 8), "4 rows of gate and of up: 8 warps in place of 4"
    assert llama_row.tile_of("qkv", 5120)[:2] == (4, 8), "more than 8 warps have fewer registers each"
    assert llama_row.tile_of("down", 10**6)[:2] == (1, 8), "a row is not divided"
    for name in TILES:
        for K in (2048, 2560, 8192, 12288):
            tile = llama_row.tile_of(name, K)
            matrices = 2 if name == "gate_up" else 1
            assert tile.rows * matrices * K <= llama_row.MAX_HELD_WEIGHTS * 32 * tile.warps


def test_slot_0_is_a_slot_like_any_other(model):
    """The same only token, stored by two runs: it reads no old keys, wherever it lies."""
    step = Step(model, [1])
    chain = LlamaRow(model, *(list(layers) for layers in step.memory))
    with torch.inference_mode():
        for slot in (1, 0):
            step.slots[0] = slot
            chain(step.token_ids, step.positions, step.slots, step.tables, step.context)
    stored = step.memory[:, :, 0, :2]  # [2, L, the slots 0 and 1, Hkv, Dh]
    assert torch.allclose(stored[:, :, 0], stored[:, :, 1], atol=1e-5), "the token lies in both slots"
