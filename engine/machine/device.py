"""Copies numbers from the host to the device that computes with them. Part 1."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def on_device(
    device: torch.device | str, *lists: Sequence[int] | np.ndarray, dtype: torch.dtype = torch.long
) -> tuple[Tensor, ...]:
    """Copy lists of whole numbers to `device`: each list[n] becomes a tensor[n] of type `dtype`.

    On a CPU, a tensor may share the memory of an int64 array that is given. A GPU receives all lists in one
    copy. The host does not wait for it, because the source is pinned memory, which the GPU reads by itself.
    """
    arrays = [np.asarray(numbers, dtype=np.int64) for numbers in lists]
    if torch.device(device).type == "cpu":
        tensors = tuple(torch.from_numpy(array) for array in arrays)
        return tensors if dtype is torch.long else tuple(tensor.to(dtype) for tensor in tensors)
    joined = torch.from_numpy(np.concatenate(arrays)).to(dtype).pin_memory()
    return joined.to(device, non_blocking=True).split([len(array) for array in arrays])
