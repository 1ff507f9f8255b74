"""Our C multiplies the very codes, in every shape, and what it does to a row depends on that row alone."""

import gc
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

import pytest
import torch

from engine.quantization import cpu, fbgemm, int8_rows
from engine.quantization.layers import Int8Linear
from engine.quantization.products import linear_of_codes, quantize_activations

MAX_LEVEL = int8_rows.MAX_LEVEL
# All lanes of a processor with AVX-512, and half of them, as a processor with AVX-VNNI has.
WIDTHS = [(), ("-DNARROW",)]
pytestmark = pytest.mark.skipif(
    not int8_rows.is_available(), reason="our C wants a compiler, and an x86 processor with VNNI"
)


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(N, K, seed=0):
    """codes[N, K], scale[N], bias[N], as they are for weights around 1: none of the exercises is needed."""
    codes = torch.randint(-MAX_LEVEL, MAX_LEVEL + 1, (N, K), generator=torch.Generator().manual_seed(seed))
    return codes.to(torch.int8), (1 + numbers(N, seed=seed).abs()) / MAX_LEVEL, numbers(N, seed=seed + 1)


def whole(T, K, seed=0):
    """[T, K] of whole numbers from -MAX_LEVEL to MAX_LEVEL, with a MAX_LEVEL in each row: steps of 1."""
    x = torch.randint(
        -MAX_LEVEL, MAX_LEVEL + 1, (T, K), generator=torch.Generator().manual_seed(seed)
    ).float()
    x[:, :1] = MAX_LEVEL
    return x


@pytest.mark.parametrize("flags", WIDTHS)
@pytest.mark.parametrize("digits", [1, 2])
@pytest.mark.parametrize(("T", "N", "K"), [
    (0, 8, 8), (1, 1, 1), (1, 31, 3), (2, 32, 4), (3, 33, 5), (5, 16, 63), (6, 48, 64), (7, 17, 65),
    (12, 70, 40), (13, 15, 130), (47, 40, 9), (48, 32, 16), (49, 33, 7), (97, 65, 12), (130, 20, 257),
])  # fmt: skip
def test_whole_numbers_are_multiplied_exactly(T, N, K, digits, flags):
    codes, x = torch.randint(-127, 128, (N, K), dtype=torch.int8), whole(T, K)
    got = int8_rows.pack(codes, torch.ones(N), torch.zeros(N), digits, *flags).product(x)
    assert got.shape == (T, N)
    assert torch.equal(got.long(), x.long() @ codes.long().T), "sums of whole numbers are exact"


@pytest.mark.parametrize("flags", WIDTHS)
def test_scales_and_bias_come_behind_the_sums(flags):
    codes, scale, bias = layer(70, 50)
    x = whole(9, 50) / 3
    want = linear_of_codes(*quantize_activations(x, MAX_LEVEL), codes, scale, bias)
    got = int8_rows.pack(codes, scale, bias, 1, *flags).product(x)
    assert torch.allclose(got, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("flags", WIDTHS)
def test_a_second_digit_loses_half_a_step_of_its_own(flags):
    """Of 1 / (2 · MOST²) of the row's largest number, per element."""
    codes, scale, bias = layer(40, 512)
    x = numbers(6, 512) * torch.tensor([1e-6, 1.0, 3.0, 1e6, 0.1, 100.0])[:, None]
    exact = x.double() @ codes.double().T * scale.double() + bias.double()
    bound = x.abs().amax(1, keepdim=True) / (4 * MAX_LEVEL**2) * codes.float().abs().sum(1) * scale
    lost = (int8_rows.pack(codes, scale, bias, 2, *flags).product(x) - exact).abs()
    rounding = 1e-5 * (x.abs() @ codes.float().abs().T * scale + bias.abs())
    assert (lost <= bound + rounding).all()
    one = (int8_rows.pack(codes, scale, bias, 1, *flags).product(x) - exact).abs()
    assert one.mean() > 20 * lost.mean(), "the second digit is worth having"


@pytest.mark.parametrize("flags", WIDTHS)
def test_no_number_is_wrong_by_more_than_half_a_step(flags):
    """One weight of 1 in each row gives back x itself, number by number."""
    codes, scale = torch.eye(512, dtype=torch.int8) * MAX_LEVEL, torch.full((512,), 1 / MAX_LEVEL)
    x = numbers(6, 512) * torch.tensor([1e-25, 1e-6, 1.0, 3.0, 1e6, 1e25])[:, None]
    for digits, steps in ((1, MAX_LEVEL), (2, 2 * MAX_LEVEL**2)):
        wrong = (int8_rows.pack(codes, scale, torch.zeros(512), digits, *flags).product(x) - x).abs()
        step = x.abs().amax(1, keepdim=True) / steps
        assert (wrong <= step * 0.51).all()
        assert (wrong > step * 0.45).any(), "and steps are as large as that"


@pytest.mark.parametrize("digits", [1, 2])
def test_a_row_is_the_same_whoever_is_beside_it(digits):
    codes, scale, bias = layer(100, 96)
    product = int8_rows.pack(codes, scale, bias, digits).product
    x = numbers(60, 96) * torch.logspace(-6, 6, 60)[:, None]
    x[7] = 0
    together = product(x)
    for rows in (slice(0, 1), slice(7, 8), slice(5, 12), slice(59, 60), slice(3, 52)):
        assert torch.equal(together[rows], product(x[rows])), "to the last bit"
    assert torch.equal(together[7], bias)


@pytest.mark.parametrize("digits", [1, 2])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_number_that_is_none_spoils_its_own_row(digits, bad):
    codes, scale, bias = layer(33, 20)
    product = int8_rows.pack(codes, scale, bias, digits).product
    x = numbers(5, 20)
    want = product(x)
    x[2, 13] = bad
    got = product(x)
    assert got[2].isnan().all(), "nothing that could be taken for a result"
    others = [0, 1, 3, 4]
    assert torch.equal(got[others], want[others])


@pytest.mark.parametrize("digits", [1, 2])
def test_threads_change_nothing(digits):
    codes, scale, bias = layer(700, 300)
    product, x = int8_rows.pack(codes, scale, bias, digits).product, numbers(257, 300)
    want = product(x)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        try:
            assert torch.equal(product(x), want)
            assert torch.equal(product(x[:6]), want[:6])
        finally:
            torch.set_num_threads(1)


def test_other_dtypes_and_views():
    codes, scale, bias = layer(24, 30)
    product, x = int8_rows.pack(codes, scale, bias).product, numbers(30, 4)
    assert torch.equal(product(x.T), product(x.T.contiguous()))
    half = x.T.bfloat16()
    assert product(half).dtype == torch.bfloat16
    assert torch.equal(product(half), product(half.float()).bfloat16())
    assert torch.equal(
        int8_rows.pack(codes, scale.half(), bias.half()).product(x.T),
        int8_rows.pack(codes, scale.half().float(), bias.half().float()).product(x.T),
    ), "scales and biases of a model in fp16"


def test_a_compiler_that_hides_what_it_makes_is_told_not_to():
    """As a CC of "gcc -fvisibility=hidden" does."""
    codes, scale, bias = layer(24, 30)
    hidden = int8_rows.pack(codes, scale, bias, 1, "-fvisibility=hidden").product
    x = numbers(4, 30)
    assert torch.equal(hidden(x), int8_rows.pack(codes, scale, bias).product(x))


def test_a_program_that_prefers_other_numbers_gets_the_same():
    codes, scale, bias = layer(24, 30)
    product, x = int8_rows.pack(codes, scale, bias).product, numbers(4, 30)
    want = product(x)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(product(x), want)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("shape", "device"),
    [((3, 29), "cpu"), ((3, 31), "cpu"), ((30,), "cpu"), ((1, 3, 30), "cpu"), ((3, 30), "meta")],
)
def test_what_cannot_be_read_is_named(shape, device):
    product, x = int8_rows.pack(*layer(24, 30)).product, torch.ones(shape, device=device)
    with pytest.raises(ValueError, match=r"x is \[[^]]*\] on (cpu|meta): accepted is \[T, 30\] on a CPU"):
        product(x)


def test_threads_of_a_program_share_a_layer_and_a_copy_outlives_it():
    codes, scale, bias = layer(64, 48)
    made = Int8Linear(48, 64, torch.device("cpu"), torch.float32)
    made.product, made.packed_bytes = int8_rows.pack(codes, scale, bias, 2)
    x = [numbers(T, 48, seed=T) for T in range(1, 5)]
    want = [made(rows) for rows in x]
    made = deepcopy(made)
    gc.collect()
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda i: made(x[i % 4]), range(400)):
            assert torch.equal(got, want[len(got) - 1])


@pytest.mark.parametrize("sign", [1, -1])
def test_the_longest_row_does_not_overflow(sign):
    K = int8_rows.MAX_K
    codes = torch.full((1, K), 127 * sign, dtype=torch.int8)
    assert int8_rows.supports(codes)
    product = int8_rows.pack(codes, torch.ones(1), torch.zeros(1)).product
    for x in (torch.ones(1, K), -torch.ones(1, K)):
        assert float(product(x)) == pytest.approx(127.0 * K * sign * float(x[0, 0]), rel=1e-6)
    assert not int8_rows.supports(torch.zeros(1, K + 1, dtype=torch.int8)), "255 · 127 · K would not fit"


def test_what_is_held_is_counted_with_what_it_was_filled_up_with():
    made = int8_rows.pack(*layer(5, 30))
    narrow = int8_rows.pack(*layer(5, 30), 1, "-DNARROW")
    assert narrow.packed_bytes == 16 * 32, "5 columns up to a block of them, K up to a multiple of 4"
    assert made.packed_bytes in (16 * 32, 32 * 32)


def test_it_is_what_layers_on_a_cpu_take(monkeypatch):
    codes, scale, bias = layer(64, 64)
    assert cpu.max_activation_level() == MAX_LEVEL
    x, made = numbers(3, 64), int8_rows.pack(codes, scale, bias)
    assert torch.equal(cpu.pack_int8_dynamic(codes, scale, bias).product(x), made.product(x))
    second = int8_rows.pack(codes, scale, bias, 2).product(x)
    assert torch.equal(cpu.pack_int8(codes, scale, bias).product(x), second)
    where_they_lie = cpu.pack_int8(codes, scale, bias, may_repack=False)
    assert where_they_lie.packed_bytes == 0, "and not where the codes are read by somebody else"


def test_rows_too_long_for_it_go_another_way(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("32 bits would not do")

    monkeypatch.setattr(int8_rows, "pack", refuse)
    codes = torch.full((1, int8_rows.MAX_K + 1), 100, dtype=torch.int8)
    for make in (cpu.pack_int8_dynamic, cpu.pack_int8):
        product = make(codes, torch.ones(1), torch.zeros(1)).product
        assert float(product(torch.ones(1, codes.shape[1]))) == pytest.approx(100 * codes.shape[1], rel=1e-4)


def test_plain_layers_have_its_steps_whatever_fbgemms_are(monkeypatch):
    monkeypatch.setattr(fbgemm, "max_activation_level", lambda: 63)
    assert cpu.max_activation_level() == MAX_LEVEL


def test_without_it_there_is_fbgemm_or_plain_pytorch(monkeypatch):
    codes, scale, bias = layer(64, 64)
    x = numbers(3, 64)
    monkeypatch.setattr(int8_rows, "is_available", lambda: False)
    assert cpu.max_activation_level() == fbgemm.max_activation_level()
    for here in (fbgemm.is_available(), False):
        monkeypatch.setattr(fbgemm, "is_available", lambda here=here: here)
        want = linear_of_codes(*quantize_activations(x, cpu.max_activation_level()), codes, scale, bias)
        assert torch.allclose(cpu.pack_int8_dynamic(codes, scale, bias).product(x), want, atol=1e-4)
        exact = x @ codes.float().T * scale + bias
        assert torch.allclose(cpu.pack_int8(codes, scale, bias).product(x), exact, atol=1e-3)
