"""The chain for one row gives the logits of the quantized model's own forward pass, and stores its keys."""

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="needs the package triton")

from engine.attention.paged import Gathered, Pages
from engine.cache.memory import PageMemory
from engine.execution.graphs import ModelStep
from engine.execution.quantized_steps import fastest_steps
from engine.kernels.quantized_row import embed_codes, norm_product, product_add
from engine.kernels.single_row import SingleRow
from engine.kernels.tiles import Tile
from engine.models.loader import load_model
from engine.quantization.quantize import quantize
from engine.quantization.single_row import QuantizedSingleRow
from tests.part01.reference import random_gpt2, save
from tests.part13.test_paged_attention import DEVICE, P
from tests.part17.touched import num_outside, touched

LAYERS, WIDTH, HEADS, TOKENS = 1, 96, 6, 20  # 96: no power of two, and one group of 64 and a half
METHODS = {"int8": ("int8", None), "int4, groups of 32": ("int4", 32), "int4": ("int4", 64)}
QUICK = Tile(64, 4, 1)  # the interpreter takes as long for a tile of many rows as for one of few


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    theirs = random_gpt2(vocab_size=67, n_positions=64, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS)
    return save(theirs, tmp_path_factory.mktemp("gpt2"))


def quantized(folder, method: str, group_size: int | None = None) -> nn.Module:
    return load_model(folder, DEVICE, "float32", transform=lambda m: quantize(m, method, group_size))


@pytest.mark.parametrize("how", METHODS.values(), ids=METHODS)
def test_logits_and_stored_keys_are_the_models(folder, how):
    model = quantized(folder, *how)
    generator = torch.Generator().manual_seed(3)
    B, Dh = 4, WIDTH // HEADS
    memory = torch.randn(2, LAYERS, B, P, HEADS, Dh, generator=generator).to(DEVICE)
    mine = memory.clone()
    table = torch.randperm(B, generator=generator)[: -(-TOKENS // P)].numpy()
    pages = Pages.of([table], [TOKENS], P)
    slot = int(table[(TOKENS - 1) // P]) * P + (TOKENS - 1) % P
    token, position, slots = (torch.tensor([x], device=DEVICE) for x in (7, TOKENS - 1, slot))

    def attend(layer, q, k, v):
        for x, rows in zip(memory[:, layer], (k, v), strict=True):
            x.flatten(0, 1)[slot] = rows[0]
        return Gathered(pages, HEADS, memory[0, layer])(q, *memory[:, layer])

    with torch.inference_mode():
        step = QuantizedSingleRow(model, list(mine[0]), list(mine[1]))
        if DEVICE == "cpu":
            step.tiles = dict.fromkeys(step.tiles, QUICK)
        want = model.logits(model(token, position, attend))
        for _ in range(2):  # a second run over the same buffers: nothing is left behind by the first
            got = step(token, position, slots, *pages.on(torch.device(DEVICE)))
            assert torch.allclose(got, want, atol=2e-3), "the chain's logits are the model's"
    assert torch.allclose(mine, memory, atol=1e-3), "the new token's keys and values lie in its slot"


def memory_for(model) -> PageMemory:
    return PageMemory(model.config, 4, P, torch.device(DEVICE), torch.float32)


@pytest.mark.parametrize("how", METHODS.values(), ids=METHODS)
def test_one_row_of_a_quantized_gpt2_goes_through_the_chain_and_more_do_not(folder, how):
    model = quantized(folder, *how)
    make = fastest_steps(model, memory_for(model), 3)
    assert isinstance(make(1), QuantizedSingleRow)
    assert isinstance(make(2), ModelStep)


def test_other_models_are_left_to_part_13(folder):
    plain = load_model(folder, DEVICE, "float32")
    assert isinstance(fastest_steps(plain, memory_for(plain), 3)(1), SingleRow)
    gone = quantized(folder, "int8")
    gone.blocks[0].mlp.up.packed_bytes = 1  # a CPU's kernel has a layout of its own
    assert isinstance(fastest_steps(gone, memory_for(gone), 3)(1), ModelStep), "there are no codes to read"
    changed = quantized(folder, "int8")
    changed.blocks[0].mlp.down = nn.Identity()
    assert isinstance(fastest_steps(changed, memory_for(changed), 3)(1), ModelStep), "another kind of layer"
    if DEVICE == "cpu":
        dynamic = quantized(folder, "int8_dynamic")
        assert isinstance(fastest_steps(dynamic, memory_for(dynamic), 3)(1), ModelStep), (
            "activations are codes, too"
        )


INTERPRETED = pytest.mark.skipif(
    DEVICE != "cpu", reason="the interpreter tells what a kernel reads and writes"
)
K, N = 96, 40  # of a linear layer: neither fills a whole number of tiles of rows, or of words


def codes_operands(group_size: int) -> tuple[list[torch.Tensor], dict]:
    """A layer's words, scale and low, and the kernels' constants; group_size 0: int8."""
    constants = {"N": N, "K": K, "WORDS": 16, "GROUP": group_size, "PDL": False}
    if not group_size:
        scale = torch.ones(N)
        return [torch.zeros(N, K // 8, dtype=torch.int64), scale, scale], constants
    scale, low = (torch.ones(N, -(-K // group_size), dtype=torch.float16) for _ in range(2))
    return [torch.zeros(N, K // 8, dtype=torch.int32), scale, low], constants


@INTERPRETED
@pytest.mark.parametrize("group_size", [0, 32, 64])
@pytest.mark.parametrize("programs", [1, 3], ids=["each takes several tiles", "each takes one tile"])
def test_linear_layers_read_and_write_nothing_but_their_operands(group_size, programs):
    """A byte behind the last one may belong to nobody: a GPU then ends the whole process."""
    codes, constants = codes_operands(group_size)
    tiles = {"ROWS": 16, "PROGRAMS": programs}
    x, gain, weight_gain, weight_bias, out = (torch.ones(length) for length in (K, K, N, N, N))
    operands = x, *codes, gain, weight_gain, weight_bias, out
    for gelu in (False, True):
        with touched() as addresses:
            norm_product[(programs,)](*operands, 1e-5, GELU=gelu, **constants, **tiles)
        assert num_outside(addresses, operands) == 0, f"norm_product, gelu={gelu}: masks end"
    a, bias, residual = torch.ones(K), torch.ones(N), torch.ones(N)
    operands = a, *codes, bias, residual
    for interleaved in (False, True):
        with touched() as addresses:
            product_add[(programs,)](*operands, INTERLEAVED=interleaved, **constants, **tiles)
        assert num_outside(addresses, operands) == 0, f"product_add, interleaved={interleaved}: masks end"


@INTERPRETED
def test_the_embedding_reads_and_writes_nothing_but_its_operands():
    """Of the last token and the last position: nothing lies behind their rows."""
    num_tokens, num_positions = 5, 3
    token, position = torch.tensor([num_tokens - 1]), torch.tensor([num_positions - 1])
    tables = [
        (torch.ones(rows, WIDTH, dtype=torch.int8), torch.ones(rows)) for rows in (num_tokens, num_positions)
    ]
    operands = token, position, *tables[0], *tables[1], torch.empty(WIDTH)
    with touched() as addresses:
        embed_codes[(1,)](*operands, D=WIDTH, PADDED=128)
    assert num_outside(addresses, operands) == 0, "masks end where a row of a table ends"


@pytest.mark.parametrize("looks_linear", [True, False], ids=["an adapter's", "a sum's"])
def test_a_layer_in_a_wrapper_is_left_to_part_13(folder, looks_linear):
    """Adapters wrap layers (Part 18), and so do sums over ranks (Extension A), which are no linear layers."""
    model = quantized(folder, "int8")
    down = model.blocks[0].mlp.down
    model.blocks[0].mlp.down = wrapper = nn.Sequential(down)
    if looks_linear:
        wrapper.in_features, wrapper.out_features = down.in_features, down.out_features
    assert not QuantizedSingleRow.fits(model)
    assert isinstance(fastest_steps(model, memory_for(model), 3)(1), ModelStep)
