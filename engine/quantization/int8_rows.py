"""The product with int8 codes in C, for processors with the instruction VNNI. Part 17.

A row's result does not depend on other rows, as with fbgemm.py. One call of the C code does the whole
product: each number of x becomes one digit or two (`_two_digits` of cpu.py explains the digits), digits and
codes are multiplied in whole numbers, and the sums get both scales and the bias.
"""

import ctypes
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.machine.compiled import load
from engine.quantization.packed import Packed

SOURCE = Path(__file__).with_suffix(".c")
# MAX_LEVEL and ZERO_POINT must be equal to those of int8_rows.c.
MAX_LEVEL = 127  # the numbers of a row of x become levels from -127 to 127
ZERO_POINT = 128  # added to each level, since VNNI takes bytes without a sign
MAX_K = 2**16  # numbers of a row: 255 · 127 · MAX_K < 2**31, so 32 bits hold the sum of a row's products
POINTER, LONG, INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


def is_available() -> bool:
    """Whether this machine has a compiler for int8_rows.c and a processor with VNNI."""
    return load(SOURCE) is not None


def supports(codes: Tensor) -> bool:
    """Whether `pack` takes codes[N, K]."""
    return is_available() and codes.shape[1] <= MAX_K


def pack(codes: Tensor, scale: Tensor, bias: Tensor, digits: int = 1, *flags: str) -> Packed:
    """codes[N, K] in int8, scale[N], bias[N] -> the product by the C code, with a copy of the codes in its
    layout.

    `supports(codes)` must be true. `digits`: 1 or 2 digits for each number of x. `flags`: more flags for the
    compiler. Tests give -DNARROW, which compiles what a processor without AVX-512 would run.

    The product takes x[T, K] on a CPU. The product raises ValueError if x has another width or device, since
    C would read past the end of x, and MemoryError if there is no memory for the codes of x.
    """
    library = load(SOURCE, *flags)
    assert library is not None, "pack is called only where supports() says so"
    multiply = library.int8_linear
    multiply.argtypes = [
        POINTER, LONG, LONG, LONG,  # x, T, K, K'
        POINTER, POINTER, POINTER, POINTER,  # weights, zero_point_sums, scale, bias
        POINTER, LONG,  # out, N
        INT, INT,  # the number of digits, the number of threads
    ]  # fmt: skip
    N, K = codes.shape
    # 1. C computes a block of `columns` columns of x · Wᵀ, and reads four codes of each column at a time. So
    #    N is padded to whole blocks, and K to a multiple of 4, with codes of 0.
    columns = library.columns()
    missing_columns = -N % columns
    codes = F.pad(codes, (0, -K % 4, 0, missing_columns))  # [N', K']
    scale = F.pad(scale.float(), (0, missing_columns))  # [N']
    bias = F.pad(bias.float(), (0, missing_columns))  # [N']
    # 2. The codes in C's layout: weights[N' / columns, K' / 4, columns, 4].
    padded_K = codes.shape[1]
    weights = codes.view(-1, columns, padded_K // 4, 4).transpose(1, 2).contiguous()
    # 3. C multiplies level + ZERO_POINT in place of a level, which adds ZERO_POINT · Σ codes to a column's
    #    sum. C subtracts this number afterwards.
    zero_point_sums = codes.sum(1, dtype=torch.int32) * ZERO_POINT  # [N']
    operands = weights, zero_point_sums, scale, bias
    pointers = [x.data_ptr() for x in operands]

    def product(x: Tensor) -> Tensor:  # [T, K] -> [T, N]
        _ = operands  # since this function names them, the tensors behind `pointers` stay in memory
        if x.shape[1:] != (K,) or not x.is_cpu:
            raise ValueError(f"x is {list(x.shape)} on {x.device}: accepted is [T, {K}] on a CPU")
        T = len(x)
        rows = x.float().contiguous()  # [T, K]
        out = rows.new_empty(T, N)
        has_no_memory = multiply(
            rows.data_ptr(), T, K, padded_K, *pointers, out.data_ptr(), N, digits, torch.get_num_threads()
        )
        if has_no_memory:
            raise MemoryError(f"no memory for the codes of {T} rows of {K} numbers")
        return out.to(x.dtype)

    return Packed(product, weights.numel())
