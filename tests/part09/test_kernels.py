"""All kernels by name: one interface, one result. Those in Triton run on a GPU, or in its interpreter."""

import builtins
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.dense import dense_attention
from engine.attention.flash import sdpa_attention
from engine.attention.tiled import TILE, tiled_attention
from engine.attention.varlen import max_length
from engine.wiring.attention_kernel import NAMES, attention_kernel, why_no_triton
from tests.part09.sequences import DEVICE, TRITON, random_qkv, reference, wrong_sequences

in_the_interpreter = pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernels themselves")
needs_triton = pytest.mark.skipif(not TRITON, reason="needs the package triton")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 0.005, torch.bfloat16: 0.04}
every_kernel = pytest.mark.parametrize("name", ["eager", "tiled", "sdpa", *TRITON])


def kernel_of(name: str, Dh: int, dtype: torch.dtype = torch.float32):
    if name.startswith("triton") and dtype == torch.bfloat16 and DEVICE == "cpu":
        pytest.skip("the interpreter takes bfloat16 for integers; a GPU does it right")
    if name == "triton_tma":  # asked for by name on Hopper alone; here the interpreter runs it anywhere
        from engine.kernels.flash_prefill_tma import flash_prefill_tma

        return flash_prefill_tma
    return attention_kernel(name, Dh, DEVICE, dtype)


def assert_equal(name: str, lengths, dtype=torch.float32, **shape) -> None:
    q, k, v, spans = random_qkv(lengths, dtype=dtype, device=DEVICE, **shape)
    want = reference(q, k, v, spans)
    got = kernel_of(name, q.shape[2], dtype)(q, k, v, spans)
    assert got.shape == q.shape
    assert got.dtype == dtype, "what comes out has the type of q"
    wrong = wrong_sequences(got, want, spans, TOLERANCE[dtype])
    assert not wrong, (
        f"{name}: of sequences of (queries, keys) {lengths}, {wrong} are not what eager attention gives"
    )


# One sequence, then several.


@every_kernel
@pytest.mark.parametrize("length", [1, 31, 32, 33, 63, 64, 65, 100])
def test_a_sequence_as_long_as_a_tile_or_one_more_or_less(name, length):
    assert_equal(name, [(length, length)])


@every_kernel
@pytest.mark.parametrize("lengths", [[(1, 50)], [(7, 40)], [(33, 100)], [(3, 3), (5, 70)]])
def test_queries_with_a_past(name, lengths):
    assert_equal(name, lengths)


@every_kernel
@pytest.mark.parametrize(("Hq", "Hkv"), [(4, 4), (4, 2), (6, 2), (3, 1)])
def test_grouped_heads(name, Hq, Hkv):
    assert_equal(name, [(5, 5), (9, 40), (1, 6)], Hq=Hq, Hkv=Hkv)


@every_kernel
@pytest.mark.parametrize("Dh", [16, 32, 48, 64, 80, 96, 128])
def test_widths_of_heads(name, Dh):
    assert_equal(name, [(35, 35), (2, 9)], Hq=2, Hkv=1, Dh=Dh)


@every_kernel
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("Dh", [64, 80])
def test_half_precision(name, dtype, Dh):
    assert_equal(name, [(70, 70), (5, 90), (1, 3)], dtype, Hq=2, Hkv=1, Dh=Dh)


lengths = st.tuples(st.integers(1, 40), st.integers(0, 60)).map(lambda pair: (pair[0], sum(pair)))


@every_kernel
@settings(max_examples=15)
@given(st.lists(lengths, min_size=1, max_size=4), st.sampled_from([(2, 2), (4, 2)]), st.integers(0, 99))
def test_any_spans(name, lengths, heads, seed):
    assert_equal(name, lengths, Hq=heads[0], Hkv=heads[1], seed=seed)


@pytest.mark.parametrize("name", ["tiled", "sdpa"])
@pytest.mark.parametrize("length", [TILE - 1, TILE, TILE + 1, 3 * TILE + 5])
def test_lengths_around_the_tiles_that_the_engine_uses(name, length):
    assert_equal(name, [(length, length), (length, length + 300)])


# What must not get in, and what must not overflow.


# The interpreter computes in NumPy, which warns of the rows that are computed from a NaN and never stored.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@every_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_neighbours_nan_does_not_leak(name, dtype):
    q, k, v, spans = random_qkv([(5, 40), (9, 9), (30, 33)], dtype=dtype, device=DEVICE)
    want = reference(q, k, v, spans)
    q[5:14], k[40:49], v[40:49] = torch.nan, torch.nan, torch.nan  # all that is the second's
    got = kernel_of(name, q.shape[2], dtype)(q, k, v, spans)
    wrong = wrong_sequences(got, want, spans, TOLERANCE[dtype])
    assert wrong == [1], f"{name}: the second sequence is NaN; wrong, counting from 0, are {wrong}"


@every_kernel
def test_large_scores_do_not_overflow(name):
    q, k, v, spans = random_qkv([(40, 70)], device=DEVICE)
    got = kernel_of(name, q.shape[2])(q * 1e4, k, v, spans)
    assert bool(got.isfinite().all()), f"{name}: scores of 100,000 are no reason for inf or NaN"


@every_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_models_fused_projection_and_a_slots_view_are_read_where_they_lie(name, dtype):
    """q of a product that holds q, k and v side by side; k and v of a cache with heads before tokens."""
    q, k, v, spans = random_qkv([(6, 50)], Hq=2, Hkv=2, dtype=dtype, device=DEVICE)
    want = reference(q, k, v, spans)
    fused = torch.full((6, 3, 2, 16), torch.nan, dtype=dtype, device=DEVICE)
    fused[:, 0] = q
    slot = torch.full((2, 2, 90, 16), torch.nan, dtype=dtype, device=DEVICE)  # [2, Hkv, M, Dh]
    slot[:, :, :50] = torch.stack([k, v]).transpose(1, 2)
    k, v = slot[:, :, :50].transpose(1, 2)
    got = kernel_of(name, 16, dtype)(fused[:, 0], k, v, spans)
    wrong = wrong_sequences(got, want, spans, TOLERANCE[dtype])
    assert not wrong, f"{name}: strides of q, k and v are their own"


# The names.


def test_each_name_stands_for_its_kernel():
    assert NAMES == ("eager", "tiled", "sdpa", "triton")
    assert attention_kernel("eager", 64) is dense_attention
    assert attention_kernel("tiled", 64) is tiled_attention
    assert attention_kernel("sdpa", 64) is sdpa_attention


def test_an_unknown_name_is_refused_with_all_that_exist():
    with pytest.raises(ValueError, match="attention='flashy': eager, tiled, sdpa, triton are accepted"):
        attention_kernel("flashy", 64)


@needs_triton
@pytest.mark.parametrize(
    ("head_dim", "dtype", "reason"),
    [
        (129, torch.float32, "up to 128 wide, not head_dim=129"),
        (64, torch.float64, "not torch.float64"),
        pytest.param(64, torch.bfloat16, "in the interpreter", marks=in_the_interpreter),
    ],
)
def test_triton_is_refused_with_the_reason(head_dim, dtype, reason):
    with pytest.raises(ValueError, match=f"attention='triton' .*{reason}.*; eager, tiled, sdpa run here"):
        attention_kernel("triton", head_dim, DEVICE, dtype)


@needs_triton
def test_triton_on_a_cpu_needs_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=r"needs a CUDA GPU, not device='cpu' \(TRITON_INTERPRET=1"):
        attention_kernel("triton", 64, "cpu")


def test_without_the_package_triton_is_refused_and_the_others_run(monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name.partition(".")[0] == "triton":
            raise ImportError(name)
        return real(name, *rest)

    for name in [name for name in sys.modules if name.startswith("engine.kernels.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    assert "needs the package triton" in why_no_triton(64, torch.device("cuda"), torch.float16)
    assert attention_kernel("sdpa", 64) is sdpa_attention


def test_choosing_a_plain_kernel_does_not_import_triton():
    code = (
        "import sys, engine.wiring.attention_kernel as kernels; kernels.attention_kernel('sdpa', 64); "
        "assert 'triton' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr[-500:]


@needs_triton
def test_our_kernel_says_which_heads_are_too_wide():
    from engine.kernels.flash_prefill import flash_prefill

    q, k, v, spans = random_qkv([(2, 2)], Dh=144)
    with pytest.raises(ValueError, match="head_dim=144: this kernel accepts up to 128"):
        flash_prefill(q, k, v, spans)


def test_the_longest_of_several():
    assert max_length((0, 3, 10, 12)) == 7


@needs_triton
def test_tiles_are_fetched_of_what_is_aligned_to_16_bytes():
    from engine.kernels.flash_prefill_tma import describable

    x = torch.zeros(4, 2, 64, dtype=torch.float16)
    assert describable(x), "its own start and strides are"
    assert describable(x[:, :, 8:]), "a start 16 bytes later is, too"
    assert not describable(x[:, :, 4:]), "a start 8 bytes later is not"
    assert not describable(torch.zeros(4, 2, 60, dtype=torch.float16)), "heads of 120 bytes are not"
    assert not describable(x.float()), "32 bits"
    assert not describable(x.transpose(1, 2)), "a head's numbers do not lie side by side"


@needs_triton
@pytest.mark.parametrize("name", TRITON)
@pytest.mark.parametrize("lengths", [[(5, 40), (30, 33)], [(64, 64)], [(3, 3), (70, 75)]])
def test_nothing_is_written_behind_the_last_sequence(monkeypatch, name, lengths):
    """A tile is longer than what is left of a sequence, and a power of two wider than a head."""
    q, k, v, spans = random_qkv(lengths, Hq=2, Hkv=1, Dh=80, dtype=torch.float16, device=DEVICE)
    empty, behind = torch.empty, []

    def with_rows_behind(*shape, **options):
        if shape != tuple(q.shape):
            return empty(*shape, **options)
        out = torch.full((len(q) + 128, *shape[1:]), 7.0, **options)
        behind.append(out[len(q) :])
        return out[: len(q)]

    monkeypatch.setattr(torch, "empty", with_rows_behind)
    kernel_of(name, 80, torch.float16)(q, k, v, spans)
    (rows,) = behind
    assert bool((rows == 7).all()), f"{name}: the memory behind the output is somebody else's"
