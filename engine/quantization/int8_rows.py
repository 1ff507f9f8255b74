"""The product of int8 by int8 in C, for processors that have an instruction for it (VNNI). Part 17.

Promises what fbgemm.py promises, in one call for all that is done to a row: its codes, the product of whole
numbers, both scales and the bias. `digits=2` gives activations a second digit (cpu.py says how).
"""

import ctypes
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.machine.compiled import load
from engine.quantization.packed import Packed

SOURCE = Path(__file__).with_suffix(".c")
MOST, ZERO = 127, 128  # as there: the largest code of x, and the one that stands for 0
MOST_K = 2**16  # products of 255 by 127 that 32 bits can add up
POINTER, LONG, INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


def is_here() -> bool:
    """Whether there is a compiler, and a processor with the instruction."""
    return load(SOURCE) is not None


def takes(codes: Tensor) -> bool:
    """Whether `linear` multiplies by codes[N, K]."""
    return is_here() and codes.shape[1] <= MOST_K


def linear(codes: Tensor, scale: Tensor, bias: Tensor, digits: int = 1, *flags: str) -> Packed:
    """codes[N, K] in int8, scale[N], bias[N], compiled with these flags -> the product, where `takes`. It
    raises ValueError for an x that C would read beyond, or not at all: another width, another device.
    """
    library, (N, K) = load(SOURCE, *flags), codes.shape
    assert library is not None  # `takes` has looked
    multiply = library.int8_linear
    multiply.argtypes = [POINTER, LONG, LONG, LONG, *[POINTER] * 5, LONG, INT, INT]
    # Filled up to whole blocks of columns, and to fours of K; then in the order in which C reads.
    columns = library.columns()
    codes = F.pad(codes, (0, -K % 4, 0, -N % columns))
    Kp = codes.shape[1]
    weights = codes.view(-1, columns, Kp // 4, 4).transpose(1, 2).contiguous()
    zeros = codes.sum(1, dtype=torch.int32) * ZERO
    operands = weights, zeros, *(F.pad(x.float(), (0, -N % columns)) for x in (scale, bias))
    pointers = [x.data_ptr() for x in operands]

    def product(x: Tensor, keep_alive: tuple[Tensor, ...] = operands) -> Tensor:  # what `pointers` point to
        if x.shape[1:] != (K,) or not x.is_cpu:
            raise ValueError(f"x is {list(x.shape)} on {x.device}: accepted is [T, {K}] on a CPU")
        rows, T, threads = x.float().contiguous(), len(x), torch.get_num_threads()
        out = rows.new_empty(T, N)
        if multiply(rows.data_ptr(), T, K, Kp, *pointers, out.data_ptr(), N, digits, threads):
            raise MemoryError(f"no memory for the codes of {T} rows of {K} numbers")
        return out.to(x.dtype)

    return Packed(product, weights.numel())
