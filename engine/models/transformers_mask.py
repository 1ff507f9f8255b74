"""The window that a mask of the library transformers describes. Extension C.

The library describes a mask as a function: does this query see this key? `attend` supports two kinds of
masks: a token sees itself and all tokens before it, or only the last few of them, itself included (a window).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.models.checkpoint import CheckpointError

NEAR = 64  # positions on each side of an edge of a mask at which the mask is compared
# seen[K] = mask_function(batch, head, query position, key positions[K])
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def window_of(mask_function: MaskFunction, last: int) -> int | None:
    """How many tokens each token sees, itself included; None if it sees all tokens up to itself.

    A mask has too many pairs to compare them all: at most seven queries up to the position `last` are
    compared, each with some hundreds of keys up to `last` + 1.

    Raises CheckpointError if one of these pairs shows that the mask is of neither kind.
    """
    window = last - _first_key_seen(mask_function, last) + 1
    # The queries at which another mask would differ: the first two, the three around the first that does not
    # see key 0, one halfway, and the last.
    around_window = {window - 1, min(window, last), min(window + 1, last)}
    for query in sorted({0, 1, last // 2, last} | around_window):
        keys = _keys_to_compare(query, window, last)
        in_window = (keys <= query) & (keys > query - window)
        differs = _sees(mask_function, query, keys) != in_window
        if differs.any():
            raise CheckpointError(
                f"position {query} sees other positions than those before it or a window of them, as to "
                f"position {int(keys[differs][0])}"
            )
    return window if window <= last else None


def _first_key_seen(mask_function: MaskFunction, last: int) -> int:
    """The first key that the query `last` sees, by bisection: right if the query sees all keys from there on
    up to itself.
    """
    low, high = 0, last
    while low < high:
        middle = (low + high) // 2
        if _sees(mask_function, last, torch.tensor([middle])):
            high = middle
        else:
            low = middle + 1
    return low


def _keys_to_compare(query: int, window: int, last: int) -> Tensor:
    """[K]: keys near the ends of the sequence and of the query's window, and some in between."""
    edges = torch.tensor([0, query - window, query, last]).clamp(min=0)
    near_edges = edges[:, None] + torch.arange(-NEAR, NEAR + 1)  # [4, 2 · NEAR + 1]
    in_between = torch.linspace(0, last, NEAR).long()
    return torch.cat((near_edges.flatten(), in_between)).clamp(0, last + 1).unique()


def _sees(mask_function: MaskFunction, query: int, keys: Tensor) -> Tensor:
    """[K]: whether the query sees each of keys[K]."""
    zero = torch.zeros((), dtype=torch.long)  # the first sequence of a batch, and the first head
    seen = mask_function(zero, zero, torch.tensor(query), keys)
    return torch.as_tensor(seen, dtype=torch.bool).expand(len(keys))
