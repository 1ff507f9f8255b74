"""Which addresses Triton's interpreter reads and writes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
from torch import Tensor


@contextmanager
def touched() -> Iterator[list[np.ndarray]]:
    """The addresses that kernels read or write from here on: one array for each `tl.load` and `tl.store`."""
    from triton.runtime.interpreter import _interpreter as interpreter

    addresses_of_calls: list[np.ndarray] = []

    def load(addresses, mask, *others, load=interpreter.load):
        addresses_of_calls.append(addresses[mask])
        return load(addresses, mask, *others)

    def store(addresses, values, mask, store=interpreter.store):
        addresses_of_calls.append(addresses[mask])
        return store(addresses, values, mask)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "load", load)
        patch.setattr(interpreter, "store", store)
        yield addresses_of_calls


def num_outside(addresses_of_calls: Sequence[np.ndarray], tensors: Sequence[Tensor]) -> int:
    """How many of the addresses lie in none of the tensors."""
    addresses = np.unique(np.concatenate(addresses_of_calls))
    assert len(addresses), "the kernel ran in the interpreter"
    outside = np.ones(addresses.shape, bool)
    for tensor in tensors:
        start = tensor.data_ptr()
        outside &= (addresses < start) | (addresses >= start + tensor.nbytes)
    return int(outside.sum())
