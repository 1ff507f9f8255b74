"""The product of int8 by int8 in C, for processors that have an instruction for it (VNNI). Part 17.

Promises what fbgemm.py promises. One call does all that is done to a row of x: it becomes codes, is
multiplied in whole numbers, and gets both scales and the bias. `digits=2` gives each number of x a second
digit (cpu.py says how).
"""

import ctypes
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.machine.compiled import load
from engine.quantization.packed import Packed

SOURCE = Path(__file__).with_suffix(".c")
# int8_rows.c has the same two numbers.
MAX_LEVEL = 127  # a row of x becomes levels from -127 to 127
ZERO_POINT = 128  # added to each level: VNNI takes bytes without a sign
MAX_K = 2**16  # numbers of a row: 255 · 127 · MAX_K < 2**31, so that 32 bits hold the sum of its products
POINTER, LONG, INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


def is_available() -> bool:
    """Whether this machine has a compiler for int8_rows.c, and a processor with the instruction."""
    return load(SOURCE) is not None


def supports(codes: Tensor) -> bool:
    """Whether `pack` takes codes[N, K]."""
    return is_available() and codes.shape[1] <= MAX_K


def pack(codes: Tensor, scale: Tensor, bias: Tensor, digits: int = 1, *flags: str) -> Packed:
    """Lay int8 codes[N, K] out for the C code; needs `supports(codes)`. scale[N], bias[N]; `flags`: for the
    compiler.

    The product takes x[T, K] on a CPU. It raises ValueError for another width or device, since C would read
    past the end of x, and MemoryError if there is none for the codes of x.
    """
    library = load(SOURCE, *flags)
    assert library is not None, "pack is called only where supports() says so"
    multiply = library.int8_linear
    multiply.argtypes = [POINTER, LONG, LONG, LONG, *[POINTER] * 5, LONG, INT, INT]
    N, K = codes.shape
    # C reads blocks of columns (of x · Wᵀ), and four codes of each at a time. Codes of 0 fill both up.
    columns = library.columns()
    codes = F.pad(codes, (0, -K % 4, 0, -N % columns))  # [N', K']
    padded_K = codes.shape[1]
    weights = (
        codes.view(-1, columns, padded_K // 4, 4).transpose(1, 2).contiguous()
    )  # [., K' / 4, columns, 4]
    # A level l of x is multiplied as l + ZERO_POINT: C subtracts what that adds to each column's sum.
    zero_point_sums = codes.sum(1, dtype=torch.int32) * ZERO_POINT  # [N']
    scale, bias = (F.pad(x.float(), (0, -N % columns)) for x in (scale, bias))  # [N'] each
    operands = weights, zero_point_sums, scale, bias
    pointers = [x.data_ptr() for x in operands]

    def product(x: Tensor, keep_alive: tuple[Tensor, ...] = operands) -> Tensor:
        # `keep_alive` is not read: the default keeps the tensors alive that `pointers` point into.
        if x.shape[1:] != (K,) or not x.is_cpu:
            raise ValueError(f"x is {list(x.shape)} on {x.device}: accepted is [T, {K}] on a CPU")
        rows, T, threads = x.float().contiguous(), len(x), torch.get_num_threads()
        out = rows.new_empty(T, N)
        if multiply(rows.data_ptr(), T, K, padded_K, *pointers, out.data_ptr(), N, digits, threads):
            raise MemoryError(f"no memory for the codes of {T} rows of {K} numbers")
        return out.to(x.dtype)

    return Packed(product, weights.numel())
