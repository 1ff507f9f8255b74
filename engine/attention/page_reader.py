"""Decode attention over pages on a CPU, in C. Part 12.

Promises the numbers of `Gathered` (paged.py) up to rounding. Reads only a sequence's own tokens, and a
sequence's result does not depend on the other sequences of the step.
"""

import ctypes
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.machine.compiled import load

SOURCE = Path(__file__).with_suffix(".c")
POINTER, LONG = ctypes.c_void_p, ctypes.c_int64


def is_available() -> bool:
    """Whether this machine can compile and load page_reader.c. The first call compiles the file."""
    return load(SOURCE) is not None


class PageReader:
    """The `AttentionPlan` (slot_decode.py) that calls page_reader.c: one new token of each of S sequences.

    Can be made only if `is_available()`. Queries, keys and values must be fp32 on a CPU.
    """

    def __init__(self, tables: np.ndarray, lens: np.ndarray) -> None:
        """tables[S, W] and lens[S] are the fields of `Pages` (paged.py)."""
        self.tables = np.ascontiguousarray(tables, dtype=np.int64)
        self.lens = np.ascontiguousarray(lens, dtype=np.int64)
        # Three arguments of read_pages in page_reader.c: tables, W and lens.
        self._table_arguments = self.tables.ctypes.data, self.tables.shape[1], self.lens.ctypes.data
        library = load(SOURCE)
        assert library is not None, "PageReader is made only where is_available() says so"
        self._read = library.read_pages
        self._read.argtypes = [
            POINTER, LONG,  # q, and the floats from one sequence's heads to the next sequence's
            POINTER, POINTER, POINTER,  # keys, values, out
            POINTER, LONG, POINTER,  # tables, W, lens
            LONG, LONG, LONG, LONG, LONG,  # S, P, Hq, Hkv, Dh
            ctypes.c_float, ctypes.c_int,  # the scale of scores, the number of threads
        ]  # fmt: skip

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """q[S, Hq, Dh], keys and values[B, P, Hkv, Dh] -> [S, Hq, Dh].

        Raises MemoryError if the C code cannot allocate its buffers.
        """
        (S, Hq, Dh), (_, P, Hkv, _) = q.shape, keys.shape
        if q.stride(1) != Dh or q.stride(2) != 1:  # the C code reads one token's heads as neighbours
            q = q.contiguous()
        out = keys.new_empty(S, Hq, Dh)  # fp32 like `keys`; torch's default dtype may differ
        has_no_memory = self._read(
            q.data_ptr(), q.stride(0), keys.data_ptr(), values.data_ptr(), out.data_ptr(),
            *self._table_arguments, S, P, Hq, Hkv, Dh, Dh**-0.5, torch.get_num_threads(),
        )  # fmt: skip
        if has_no_memory:
            raise MemoryError(f"no memory to attend {S} sequences")
        return out
