"""Layers over codes: what they promise whatever kernel runs them."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

from engine.quantization import cpu, fbgemm, int8_rows
from engine.quantization.layers import LINEARS, Int8Embedding, Int8Linear
from engine.quantization.products import linear_of_codes, quantize_activations

SHAPES = [(64, 16), (100, 37), (130, 48), (8, 3)]  # in, out
needs_fbgemm = pytest.mark.skipif(not fbgemm.is_available(), reason="int8 by int8 is FBGEMM's, for x86 alone")


def layer(method, inputs, outputs, bias=True, group_size=32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = LINEARS[method](inputs, outputs, torch.device("cpu"), torch.float32, group_size=group_size)
    made.set_weight(
        torch.randn(outputs, inputs, generator=generator) * 0.05,
        torch.randn(outputs, generator=generator) if bias else None,
    )
    return made


def rows(T, K, seed=1):
    return torch.randn(T, K, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("method", LINEARS)
@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_packed_computes_what_plain_computes(method, shape):
    made = layer(method, *shape)
    for T in (0, 1, 2, 9, 40):
        x = rows(T, shape[0])
        made.product = None
        want = made.plain(x)
        packed = layer(method, *shape)
        packed.pack()
        got = packed(x)
        assert got.shape == (T, shape[1])
        loose = (
            3 * float(made.scale.max()) / 63 * float(x.abs().max()) * 127
            if T and "dynamic" in method
            else 2e-3
        )
        assert (got - want).abs().max() <= loose if T else True, "packing changes the speed, not the numbers"


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_the_result_is_that_of_a_linear_layer_with_the_codes_weights(method):
    made = layer(method, 96, 24)
    x = rows(5, 96)
    want = nn.functional.linear(x, made.weight_in_fp32(), made.bias)
    assert torch.allclose(made(x), want, atol=1e-4), "y = x · (what the codes stand for)ᵀ + b"


@pytest.mark.parametrize("method", LINEARS)
def test_it_says_its_shape_as_a_linear_layer_does(method):
    made = layer(method, 96, 24)
    assert (made.in_features, made.out_features) == (96, 24)
    assert not isinstance(made, nn.Linear), "packing of plain layers must leave it alone"


@pytest.mark.parametrize("method", LINEARS)
def test_without_a_bias_nothing_is_added(method):
    made = layer(method, 32, 8, bias=False)
    assert not made(torch.zeros(2, 32)).any()
    made.pack()
    assert not made(torch.zeros(2, 32)).any(), "a row of zeros gives the bias, and no NaN"


@pytest.mark.parametrize("method", LINEARS)
@torch.inference_mode()
def test_a_row_does_not_depend_on_the_others(method):
    """Or a request's text would depend on who is in the batch with it."""
    made = layer(method, 128, 32)
    made.pack()
    x = rows(6, 128)
    x[3] *= 1000
    x[4] = 0
    together = made(x)
    for i in range(6):
        assert torch.allclose(
            together[i], made(x[i : i + 1])[0], rtol=1e-4, atol=1e-4 * float(x[i].abs().max() + 1)
        )


@needs_fbgemm
@pytest.mark.parametrize("T", [1, 5, fbgemm.SCRATCH_ROWS, fbgemm.SCRATCH_ROWS + 1, 100])
@pytest.mark.parametrize("make", [fbgemm._low_overhead_product, fbgemm._stable_api_product])
@torch.inference_mode()
def test_fbgemm_multiplies_the_very_codes(make, T):
    """Garbage comes without an error here, so values are compared."""
    has_functions = hasattr(torch, "fbgemm_linear_int8_weight_fp32_activation")
    if make is fbgemm._low_overhead_product and not has_functions:
        pytest.skip("this PyTorch has only the way that stays")
    most = fbgemm.max_activation_level()
    codes = torch.randint(-127, 128, (20, 70), generator=torch.Generator().manual_seed(0), dtype=torch.int8)
    steps = torch.randint(-most, most + 1, (T, 70), generator=torch.Generator().manual_seed(1))
    got = make(codes, most)(steps.float(), most)
    want = (steps @ codes.long().T) / most
    assert torch.allclose(got.double(), want.double(), rtol=1e-6, atol=1e-3), "whole numbers multiply exactly"


def test_each_thread_writes_to_rows_of_its_own():
    rows_for = fbgemm._padded_rows(8, 127).get
    with ThreadPoolExecutor(1) as pool:
        theirs, _ = pool.submit(rows_for, 2).result()
    ours, inner = rows_for(2)
    assert ours.data_ptr() != theirs.data_ptr()
    assert rows_for(2)[1] is inner, "kept from one product to the next"
    assert rows_for(3)[0].data_ptr() == ours.data_ptr(), "in one place, however many rows there are"


@needs_fbgemm
@torch.inference_mode()
def test_the_largest_codes_do_not_overflow():
    for sign in (1, -1):
        codes = torch.full((4, 256), 127 * sign, dtype=torch.int8)
        for make in (cpu._one_digit, cpu._two_digits):
            got = make(codes, torch.ones(4), torch.zeros(4)).product(torch.full((1, 256), 2.0))
            assert torch.allclose(got, torch.tensor(2.0 * 127 * 256 * sign), rtol=1e-4), (
                "sums of products are whole: 16 bits would cut them off"
            )


@needs_fbgemm
@torch.inference_mode()
def test_two_digits_lose_a_7000th_of_a_rows_largest_number():
    """One step of the second digit is 1 / (2 · most²) of it, and half a step may be lost per element."""
    made = layer("int8", 512, 8)
    product = cpu._two_digits(made.codes, made.scale, made.bias).product
    x = rows(4, 512)
    bound = x.abs().amax(1, keepdim=True) / 7000 * made.weight_in_fp32().abs().sum(1)
    assert ((product(x) - made.plain(x)).abs() <= bound).all()
    assert (product(x) - made.plain(x)).abs().max() < 1e-3


@torch.inference_mode()
def test_dynamic_computes_with_activations_as_codes():
    made = layer("int8_dynamic", 64, 8)
    x = rows(3, 64)
    codes = quantize_activations(x, fbgemm.max_activation_level())
    want = linear_of_codes(*codes, made.codes, made.scale, made.bias)
    assert torch.equal(made.plain(x), want), "each row has its own scale"
    half = x.bfloat16()
    assert torch.equal(made.plain(half), made.plain(half.float()).bfloat16()), "scales are in fp32"
    exact = Int8Linear.plain(made, x)
    assert 0 < (want - exact).abs().max() < 0.1, "activations are rounded, too"


@pytest.mark.parametrize("ways", [cpu._by_pieces, cpu._two_digits, cpu._aten_by_rows])
@pytest.mark.parametrize("piece", [128, 2**18])
@torch.inference_mode()
def test_every_way_by_rows(ways, piece, monkeypatch):
    if ways is cpu._two_digits and not fbgemm.is_available():
        pytest.skip("FBGEMM's alone")
    monkeypatch.setattr(cpu, "PIECE", piece)
    made = layer("int8", 64, 19)
    x = rows(3, 64)
    assert torch.allclose(ways(made.codes, made.scale, made.bias).product(x), made.plain(x), atol=1e-3)


@pytest.mark.parametrize("ways", [cpu._even_and_odd, cpu._aten_by_groups])
@pytest.mark.parametrize("piece", [256, 2**18])
@torch.inference_mode()
def test_every_way_by_groups(ways, piece, monkeypatch):
    monkeypatch.setattr(cpu, "PIECE", piece)
    made = layer("int4", 64, 32)
    x = rows(3, 64)
    got = ways(made.nibbles, made.scale, made.low, made.bias, 32).product(x)
    assert torch.allclose(got, made.plain(x), atol=1e-3)


@pytest.mark.parametrize("ways", [cpu._by_pieces, cpu._two_digits, cpu._aten_by_rows])
@torch.inference_mode()
def test_sums_by_rows_may_be_larger_than_fp16_can_hold(ways):
    if ways is cpu._two_digits and not fbgemm.is_available():
        pytest.skip("FBGEMM's alone")
    x, codes = torch.full((2, 64), 128.0).half(), torch.full((16, 64), 127, dtype=torch.int8)
    bias = torch.zeros(16) if ways is cpu._two_digits else torch.zeros(16).half()
    got = ways(codes, torch.full((16,), 2.0**-11), bias).product(x)
    assert got.dtype == torch.float16
    assert torch.allclose(got.float(), torch.tensor(64 * 128 * 127 / 2**11), rtol=2e-3), "sums are in fp32"


@pytest.mark.parametrize("method", ["int8", "int4"])
@torch.inference_mode()
def test_codes_that_are_read_where_they_lie_are_not_held_twice(method):
    made, x = layer(method, 64, 5), rows(2, 64)  # 5 rows: PyTorch's kernel in four bits takes 16
    made.pack(may_repack=False)
    before = made(x)
    (made.codes if method == "int8" else made.nibbles).zero_()
    assert made.packed_bytes == 0
    assert not torch.equal(made(x), before), "the kernel reads the layer's codes, no copy of them"


@torch.inference_mode()
def test_what_others_read_gets_no_layout_of_its_own(monkeypatch):
    """A tied head's codes are the embedding's."""
    monkeypatch.delattr(cpu, "_two_digits")
    monkeypatch.delattr(int8_rows, "pack")
    made, x = layer("int8", 64, 16), rows(2, 64)
    made.pack(may_repack=False)
    assert made.packed_bytes == 0
    assert torch.allclose(made(x), made.plain(x), atol=1e-4)


@needs_fbgemm
@pytest.mark.parametrize("make", [cpu._one_digit, cpu._two_digits])
def test_a_layout_of_its_own_is_counted(make):
    codes = torch.ones(6, 32, dtype=torch.int8)
    packed_bytes = make(codes, torch.ones(6), torch.zeros(6)).packed_bytes
    assert packed_bytes == 6 * 32, "or a model's bytes would leave it out, and the codes would stay beside it"


def test_a_copy_that_is_filled_up_is_counted_and_the_codes_are_let_go():
    made = layer("int4", 100, 5)  # groups of 32: the last has 4
    made.pack()
    assert not hasattr(made, "nibbles")
    assert made.packed_bytes == 5 * 128 // 2 + 2 * 5 * 4 * 2, (
        "codes up to a whole group; scale and low in fp16"
    )


STORYTELLER = {
    "qkv": (768, 256),
    "proj": (256, 256),
    "up": (1024, 256),
    "down": (256, 1024),
    "head": (4096, 256),
}


@pytest.mark.parametrize("shape", STORYTELLER)
@pytest.mark.parametrize("method", ["int8", "int8_dynamic"])
@pytest.mark.parametrize("c", [True, False], ids=["C", "FBGEMM"])
@torch.inference_mode()
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(shape, method, c, monkeypatch):
    """For the embedded model's layers: what `ruvon serve --quantization int8` promises of them."""
    if not (int8_rows.is_available() if c else fbgemm.is_available()):
        pytest.skip("it is not here")
    monkeypatch.setattr(int8_rows, "is_available", lambda: c)
    N, K = STORYTELLER[shape]
    made = layer(method, K, N)
    made.pack()
    x = rows(70, K) * torch.logspace(-3, 3, 70)[:, None]  # large rows beside small ones
    alone = torch.cat([made(row[None]) for row in x])
    for start, count in ((0, 2), (3, 5), (0, 32), (5, 65), (0, 70)):
        beside = made(x[start : start + count])
        assert torch.equal(beside, alone[start : start + count]), f"{count} rows: other bits than alone"
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(made(x), alone), "two threads: other bits than one"
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("dtype", "rows_of_w", "way"), [("bfloat16", 32, "aten"), ("bfloat16", 20, "own"), ("float32", 32, "own")]
)
def test_pytorchs_kernels_are_for_bf16(dtype, rows_of_w, way, monkeypatch):
    """In fp32 they take a hundred times as long as ours."""
    chosen = []
    for name in ("_aten_by_groups", "_even_and_odd", "_aten_by_rows", "_by_pieces"):
        monkeypatch.setattr(cpu, name, lambda *_, name=name: chosen.append(name) or cpu.Packed(abs, 0))
    bias = torch.zeros(rows_of_w, dtype=getattr(torch, dtype))
    nibbles, scale = torch.zeros(rows_of_w, 32, dtype=torch.uint8), torch.zeros(rows_of_w, 1)
    cpu.pack_int4(nibbles, 64, scale, scale, bias, 64)
    assert chosen == ["_aten_by_groups" if way == "aten" else "_even_and_odd"]
    cpu.pack_int8(torch.zeros(rows_of_w, 64, dtype=torch.int8), scale[:, 0], bias, may_repack=False)
    assert chosen[1] == ("_by_pieces" if dtype == "float32" else "_aten_by_rows")


def test_an_embeddings_row_is_code_times_scale():
    table = Int8Embedding(4, 3, torch.device("cpu"), torch.float32)
    table.set_weight(torch.tensor([[0.0, 0.0, 0.0], [1.27, -0.5, 0.0], [127.0, 1.0, -2.0], [0.1, 0.1, 0.1]]))
    assert torch.allclose(table(torch.tensor([2, 1])), torch.tensor([[127.0, 1.0, -2.0], [1.27, -0.5, 0.0]]))
    with pytest.raises(IndexError):
        table(torch.tensor([4]))
    assert table(torch.tensor([], dtype=torch.long)).shape == (0, 3)


@pytest.mark.parametrize("method", LINEARS)
@torch.inference_mode()
def test_the_number_of_threads_changes_nothing(method):
    made, x = layer(method, 256, 64), rows(3, 256)
    made.pack()
    want = made(x)
    torch.set_num_threads(2)
    try:
        assert torch.allclose(made(x), want, atol=1e-5)
    finally:
        torch.set_num_threads(1)


@needs_fbgemm
def test_fbgemm_warns_of_nothing_and_leaves_its_hosts_filters_alone():
    """In a process of its own: torch warns of what will go one day at the first call, and then no more."""
    code = """
import warnings, torch
warnings.simplefilter("error")
before = list(warnings.filters)
from engine.quantization import fbgemm
product = fbgemm.scaled_product(torch.ones(8, 16, dtype=torch.int8), fbgemm.max_activation_level())
assert product(torch.ones(2, 16), 1.0)[0, 0] == 16
assert warnings.filters == before
"""
    subprocess.run([sys.executable, "-c", code], cwd=Path(fbgemm.__file__).parents[2], check=True)


@pytest.mark.parametrize("method", LINEARS)
def test_an_option_that_no_layer_has_is_refused(method):
    with pytest.raises(TypeError, match="groupsize"):
        LINEARS[method](8, 8, torch.device("cpu"), torch.float32, group_size=8, groupsize=8)
