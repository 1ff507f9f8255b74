"""Random numbers that are functions of a seed and a position: no generator, and so no state. Part 5.

Promises that a number does not depend on the other rows of its batch, on the size of the vocabulary, or on
what was drawn before. All devices give the same numbers, up to the rounding of a logarithm. Knows no tokens'
probabilities: engine/decoding/sampling.py draws with these numbers.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

INT32_OFFSET = 2**31  # added to a signed number of 32 bits, it gives a number from 0 to 2**32 - 1
MASK_64 = 2**64 - 1  # the lowest 64 bits of a number
CACHE_NUMBERS = 2**15  # numbers of noise that are computed at a time: a core's cache holds them


def exponential_noise(seeds: Sequence[int], positions: Sequence[int], V: int, device: torch.device) -> Tensor:
    """[R, V] in fp32, all above 0: exponential random numbers of mean 1, for seeds[R] and positions[R].

    Each number is a function of its row's seed and position and of its token id. If u is uniform between 0
    and 1, -log(u) is exponential. Here u is a hash of the row's key and the token id.
    """
    # 1. Each row's key, as two halves of 32 bits.
    row_keys = [_key(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    keys = np.array(row_keys, dtype=np.uint64)  # [R]
    halves = keys.view(np.int32).reshape(-1, 2)  # [R, 2]
    # 2. On a GPU, all numbers at once.
    if device.type != "cpu":
        halves_on_gpu = torch.from_numpy(halves).to(device, non_blocking=True)  # [R, 2]
        hashes = _hash32(_hashes_of_ids(V, device), halves_on_gpu[:, :1], halves_on_gpu[:, 1:])  # [R, V]
        uniform_numbers = (hashes.double() + (INT32_OFFSET + 0.5)) / 2**32  # between 0 and 1, both excluded
        return -uniform_numbers.log().float()
    # 3. On a CPU, as many rows at a time as its cache holds.
    noise = np.empty((len(keys), V), dtype=np.float32)
    id_hashes = _hashes_of_ids(V, device).numpy()  # [V]
    num_rows = max(1, CACHE_NUMBERS // V)
    for start in range(0, len(keys), num_rows):
        rows = slice(start, start + num_rows)
        hashes = _hash32(id_hashes, halves[rows, :1], halves[rows, 1:])  # [num_rows, V]
        uniform_numbers = hashes + (INT32_OFFSET + 0.5)  # [num_rows, V] in double
        uniform_numbers /= 2**32  # between 0 and 1, both excluded
        np.log(uniform_numbers, out=uniform_numbers)
        np.negative(uniform_numbers, out=noise[rows], casting="same_kind")  # rounds to fp32
    return torch.from_numpy(noise)


@lru_cache(maxsize=8)
def _hashes_of_ids(V: int, device: torch.device) -> Tensor:
    """[V] in int32: a hash of each token id, so that neighbouring ids get unrelated noise."""
    return _hash32(torch.arange(V, dtype=torch.int32, device=device), first=0, second=0)


def _hash32(x: Any, first: Any, second: Any) -> Any:
    """Hash x with a key of 64 bits, given as two halves `first` and `second`.

    The steps are the two multiplications of lowbias32, each with a shift after it (Wellons 2018,
    https://nullprogram.com/blog/2018/07/31/). One half of the key is mixed in before each multiplication. All
    arguments are arrays or tensors in int32, or 0. They overflow in the same way on a CPU and a GPU.
    """
    x = x ^ first
    x *= 0x21F0AAAD
    x ^= (x >> 15) & 0x1FFFF  # the mask makes the shift of a signed number unsigned
    x += second
    x *= 0x735A2D97
    x ^= (x >> 15) & 0x1FFFF
    return x


def uniform(seed: int, position: int) -> float:
    """A random number in [0, 1), a function of `seed` and `position`, for an accept or reject (Part 16)."""
    return (_key(seed, position) >> 11) / 2**53  # the upper 53 bits, as many as a double holds


def _key(seed: int, position: int) -> int:
    """64 random bits, a function of `seed` and `position`: SplitMix64 (Steele et al. 2014) as a hash."""
    return _mix((_mix(seed & MASK_64) + (position + 1) * 0x9E3779B97F4A7C15) & MASK_64)


def _mix(z: int) -> int:
    """The last step of SplitMix64, which mixes the 64 bits of z."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK_64
    return z ^ (z >> 31)
