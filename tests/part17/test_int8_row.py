"""One row of x times a matrix of codes, in Triton: by hand. Without a GPU it runs in the interpreter."""

import pytest
import torch

pytest.importorskip("triton", reason="needs the package triton")

import triton

from engine.kernels.quantized_matmul import _int8_row

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
UNWRITTEN = -1.0


def product(x, codes, scale=None, bias=None, rows: int = 2, inner: int = 4, dtype=torch.float32) -> list:
    """out[N + 4]: what programs of `rows` rows have written, and UNWRITTEN where none has.

    Behind x and behind the codes lie other numbers, as in a memory that others use, too.
    """
    N, K = len(codes), len(x)
    scale = torch.tensor(scale or [1.0] * N, device=DEVICE)
    bias = torch.tensor(bias or [0.0] * N, device=DEVICE, dtype=dtype)
    out = torch.full((N + 4,), UNWRITTEN, device=DEVICE, dtype=dtype)
    x = torch.tensor([*x, *[10_000.0] * 16], device=DEVICE, dtype=dtype)
    lines = [code for row in codes for code in row]
    memory = torch.tensor([*lines, *[100] * 64], device=DEVICE, dtype=torch.int8)
    grid = (triton.cdiv(N, rows),)
    _int8_row[grid](x, memory, scale, bias, out, N=N, K=K, ROWS=rows, INNER=inner)
    return out.tolist()


def test_a_sum_over_each_row():
    got = product([1, 2, 3, 4], [[1, 1, 1, 1], [1, 0, -1, 2]])
    assert got[:2] == [10, 6], "out[n] is the sum of x · code over row n: 1 + 2 + 3 + 4, and 1 - 3 + 8"


def test_the_scale_comes_after_the_sum_and_the_bias_after_the_scale():
    got = product([1, 2, 3, 4], [[1, 1, 1, 1], [1, 0, -1, 2]], scale=[0.5, 2.0], bias=[100.0, 200.0])
    assert got[:2] == [105, 212], "the sum, times its row's scale, and then its row's bias"


def test_a_row_may_be_longer_than_what_is_taken_at_a_time():
    got = product(range(1, 9), [[1] * 8], inner=4)
    assert got[0] == 36, "all K numbers are added, INNER at a time: 1 to 8 make 36"


def test_scale_and_bias_come_once():
    got = product(range(1, 9), [[1] * 8], scale=[0.5], bias=[100.0], inner=4)
    assert got[0] == 118, "scale and bias come once, behind the last slice: 36 / 2 + 100"


def test_where_a_row_begins():
    got = product(range(1, 9), [[1] * 8, [2] * 8], inner=4)
    assert got[:2] == [36, 72], "row n of the codes begins K · n codes in"


def test_a_row_ends_where_it_ends():
    got = product([1, 2, 3, 4, 5, 6], [[1] * 6, [2] * 6], inner=4)
    assert got[:2] == [21, 42], "the last slice is shorter: what lies behind the K numbers does not count"


def test_each_program_has_rows_of_its_own():
    codes = [[n, 0, 0, 0] for n in range(1, 6)]
    got = product([1, 2, 3, 4], codes, rows=2)
    assert got[:5] == [1, 2, 3, 4, 5], "program p takes the rows from p · ROWS on"
    assert got[5:] == [UNWRITTEN] * 4, "nothing is written behind the last row"


@pytest.mark.skipif(DEVICE != "cpu", reason="only the interpreter tells what a kernel reads")
def test_nothing_is_read_that_is_not_there(monkeypatch):
    """What is masked in x adds 0, whatever the code: no sum tells that somebody else's memory was read."""
    from triton.runtime.interpreter import InterpreterBuilder

    load, read = InterpreterBuilder.create_masked_load, []

    def noted(self, addresses, mask, *rest):
        read.extend(addresses.data[mask.data].tolist())
        return load(self, addresses, mask, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", noted)
    N, K = 3, 6
    given = {"x": (torch.float32, K), "codes": (torch.int8, N * K)}
    given |= {"scale": (torch.float32, N), "bias": (torch.float32, N)}
    inside = {name: torch.zeros(1000, dtype=dtype)[400 : 400 + size] for name, (dtype, size) in given.items()}
    _int8_row[(2,)](*inside.values(), torch.zeros(N), N=N, K=K, ROWS=2, INNER=4)
    for name, tensor in inside.items():
        first, around = tensor.data_ptr(), tensor.element_size() * 400
        end = first + tensor.numel() * tensor.element_size()
        near = {address for address in read if first - around <= address < end + around}
        assert near, f"{name} is read"
        assert all(first <= address < end for address in near), (
            f"{name} is read where it has ended: loads are masked by the row, which is below N, and by the "
            "place in it, which is below K"
        )


def test_sums_are_in_fp32():
    """64 · 128 · 127 is 1,040,384, and fp16 ends at 65,504. The result fits."""
    got = product([128.0] * 64, [[127] * 64], scale=[2.0**-11], dtype=torch.float16)
    assert got[0] == 508, "sums are in fp32, whatever x is in: only the result is rounded"
