"""Copies the host's numbers to the device that computes with them. Part 1."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def on_device(
    device: torch.device | str, *lists: Sequence[int] | np.ndarray, dtype: torch.dtype = torch.long
) -> tuple[Tensor, ...]:
    """A tensor[n] of each list[n], in `dtype`. A GPU gets all of them in one copy, and the host does not wait
    for it: the copy starts from pinned memory, which the GPU can read by itself.
    """
    arrays = [np.asarray(numbers, dtype=np.int64) for numbers in lists]
    if torch.device(device).type == "cpu":
        tensors = tuple(torch.from_numpy(array) for array in arrays)
        return tensors if dtype is torch.long else tuple(tensor.to(dtype) for tensor in tensors)
    joined = torch.from_numpy(np.concatenate(arrays)).to(dtype).pin_memory()
    return joined.to(device, non_blocking=True).split([len(array) for array in arrays])
