"""A decode step of Llama or Qwen3 in few kernels: the logits and keys of the model's own forward pass."""

import pytest
import torch

pytest.importorskip("triton", reason="needs the package triton")

from benchmarks.part20_models import random_model
from engine.cache.memory import PageMemory
from engine.execution.graphs import ModelStep
from engine.execution.steps import fastest_steps
from engine.kernels import llama_attend
from engine.kernels.llama_row import LlamaRow
from engine.kernels.llama_rows import LlamaRows
from engine.layers.packed_linear import Transposed
from engine.layers.replace import replace_linears
from engine.models.loader import load_model
from engine.quantization.quantize import quantize
from engine.quantization.single_row import QuantizedSingleRow
from tests.part01.reference import random_gpt2, save
from tests.part13.test_many_rows import TOLERANCE, VOCAB, Step
from tests.part13.test_paged_attention import DEVICE

TIED = {"tie_word_embeddings": True}
MODELS = {
    "llama, two layers": ("llama", {"head_dim": 16, "num_hidden_layers": 2}),
    "a key head each, tied": ("llama", {"head_dim": 32, "num_key_value_heads": 4} | TIED),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3, wide heads, yarn": (
        "qwen3",
        {
            "head_dim": 32, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 1100,
            "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        },
    ),
}  # fmt: skip
OTHERS = {
    "biases": ("llama", {"head_dim": 16, "attention_bias": True}),
    "biases in the mlp": ("llama", {"head_dim": 16, "mlp_bias": True}),
    "narrow heads": ("llama", {"head_dim": 8}),
    "heads of no power of two": ("qwen3", {"head_dim": 24}),
}


def made(family: str, settings: dict, folder):
    theirs = random_model(family, **{"vocab_size": VOCAB, "num_hidden_layers": 1} | settings)
    return load_model(save(theirs, folder), DEVICE, "float32")


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    return made(*MODELS[request.param], tmp_path_factory.mktemp("model"))


class RowsStep(Step):
    def check(self, max_rows: int) -> None:
        memory = self.memory.clone()
        step = LlamaRows(self.model, list(memory[0]), list(memory[1]), max_rows)
        inputs = self.token_ids, self.positions, self.slots, self.tables, self.context
        with torch.inference_mode():
            logits, stored = self.want()
            for _ in range(2):  # a second run over the same buffers: nothing is left behind by the first
                got = step(*inputs)[self.live]
                assert torch.allclose(got, logits, atol=TOLERANCE), "each row's logits are the model's"
        assert torch.allclose(memory, stored, atol=1e-5), (
            "the new tokens' keys and values lie in their slots, and nothing else has changed"
        )


def test_logits_and_stored_keys_are_the_models(model):
    """A length of 0 is nobody's row, and changes nothing."""
    RowsStep(model, [0, 18, 1]).check(max_rows=4)


@pytest.mark.parametrize("lens", [[0, 18, 1], [70, 3]])
def test_with_attention_in_one_kernel_they_are_too(model, lens, monkeypatch):
    """What many rows take: `llama_attend.py`."""
    monkeypatch.setattr(llama_attend, "PROGRAMS_PER_MULTIPROCESSOR", 0)
    if not llama_attend.prefers_attend_rows(model.config, len(lens), torch.device(DEVICE)):
        pytest.skip("heads are too narrow for it")
    RowsStep(model, lens).check(max_rows=4)


def test_rows_of_one_sequence_see_each_other_if_keys_are_stored_first(model, monkeypatch):
    """In whatever order: the last token is the first row here."""
    monkeypatch.setattr(llama_attend, "PROGRAMS_PER_MULTIPROCESSOR", 0)
    config = model.config
    memory = torch.zeros(2, config.num_layers, 2, 16, config.num_kv_heads, config.head_dim, device=DEVICE)
    ids = torch.arange(5, 8, device=DEVICE)
    places = torch.arange(3, dtype=torch.int32, device=DEVICE)
    tables = torch.zeros(3, 1, dtype=torch.int32, device=DEVICE)
    step = LlamaRows(model, list(memory[0]), list(memory[1]), 3, stores_first=True)

    def attend(layer, q, k, v):
        out = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1) for x in (q, k, v)), is_causal=True, enable_gqa=True
        )
        return out.transpose(0, 1)

    with torch.inference_mode():
        got = step(*(x.flip(0) for x in (ids, places, places)), tables, places.flip(0) + 1).flip(0)
        want = model.logits(model(ids, places.long(), attend))
    assert torch.allclose(got, want, atol=TOLERANCE), "three tokens of one sequence, each a row"


def memory_for(model) -> PageMemory:
    return PageMemory(model.config, 4, 16, torch.device(DEVICE), torch.float32)


def test_it_is_taken_for_models_that_it_knows(model):
    make = fastest_steps(model, memory_for(model), 3)
    assert isinstance(make(1), LlamaRow if LlamaRow.fits(model) else LlamaRows)
    assert isinstance(make(3), LlamaRows)
    assert make(3) is make(2), "one set of buffers for all sizes"


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_run_their_own_forward_pass(name, tmp_path):
    model = made(*OTHERS[name], tmp_path)
    assert not LlamaRows.fits(model)
    assert isinstance(fastest_steps(model, memory_for(model), 3)(2), ModelStep)


@pytest.mark.parametrize("replaced", ["blocks.0.mlp.down", "blocks.0.attention.qkv", "head"])
def test_a_layer_that_was_replaced_computes_in_its_own_way(replaced, tmp_path):
    """Quantized, wrapped or packed: such a layer has no weight as it was loaded."""
    model = made("llama", {"head_dim": 16}, tmp_path)
    assert LlamaRows.fits(model)
    replace_linears(model, lambda name, linear: Transposed(linear) if name == replaced else linear)
    assert not LlamaRows.fits(model)


def test_one_row_of_a_quantized_gpt2_takes_part_17s_chain(tmp_path):
    folder = save(random_gpt2(vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=2), tmp_path)
    model = load_model(folder, DEVICE, "float32", transform=lambda m: quantize(m, "int8"))
    make = fastest_steps(model, memory_for(model), 3)
    assert isinstance(make(1), QuantizedSingleRow)
    assert isinstance(make(2), ModelStep)


def test_slot_0_is_a_slot_like_any_other_and_minus_1_is_none(model, monkeypatch):
    """Three rows with the same only token: what they store is the same, wherever it lies."""
    monkeypatch.setattr(llama_attend, "PROGRAMS_PER_MULTIPROCESSOR", 0)
    if not llama_attend.prefers_attend_rows(model.config, 3, torch.device(DEVICE)):
        pytest.skip("heads are too narrow for it")
    step = Step(model, [1, 1, 1])
    step.token_ids.fill_(5)
    step.slots[:] = torch.tensor([-1, 0, 1])
    before = step.memory.clone()
    keys, values = ([layer[1:] for layer in layers] for layers in step.memory)  # slot -1 would be in block 0
    with torch.inference_mode():
        LlamaRows(model, keys, values, 3)(
            step.token_ids, step.positions, step.slots, step.tables, step.context
        )
    stored = step.memory[:, :, 1, :2]  # [2, L, the slots 0 and 1, Hkv, Dh]
    assert torch.allclose(stored[:, :, 0], stored[:, :, 1], atol=1e-5), "slot 0 is a slot like any other"
    assert not torch.allclose(stored, before[:, :, 1, :2]), "the new tokens are stored"
    before[:, :, 1, :2] = stored
    assert torch.equal(step.memory, before), "a slot of -1 stores nothing"
