"""Attention of many sequences with one new token each, in one product over neighbouring slots. Part 6.

Promises what one call per sequence would give. A call has a price of its own, whatever its size, so sequences
of like length go together: each then reads as many keys as the longest of its group, and a mask hides what is
not its own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 8  # neighbouring slots that may go together
MAX_WASTE = 128  # tokens read in vain, per sequence, up to which going together is cheaper than a call each


@dataclass(frozen=True)
class Group:
    """S sequences in slots low to low + N, some of which may be idle or belong to a sequence that is not in
    it.
    """

    low: int
    longest: int  # keys each of them reads
    rows: Tensor  # [S]: their rows of the step's queries
    places: Tensor  # [S]: their slots, counted from low
    mask: Tensor  # [N, 1, 1, longest]: 0 for a sequence's own keys, -inf for the rest

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """q[T, Hq, Dh], keys and values[slots, Hkv, M, Dh] -> this group's rows of out[T, Hq, Dh]."""
        N, (Hq, Dh), Hkv = len(self.mask), q.shape[1:], keys.shape[1]
        k, v = (cache[self.low : self.low + N, :, : self.longest] for cache in (keys, values))  # views
        queries = q.new_zeros(N, Hq, Dh)
        queries[self.places] = q[self.rows] * Dh**-0.5
        scores = queries.view(N, Hkv, -1, Dh) @ k.transpose(2, 3) + self.mask  # [N, Hkv, G, longest]
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype)
        out[self.rows] = (weights @ v).view(N, Hq, Dh)[self.places]


def grouped(rows: Sequence[int], slots: Sequence[int], lens: Sequence[int], like: Tensor) -> Iterator[Group]:
    """Groups for these sequences (row, slot and length of each), leaving out those that are better off alone.

    `like` gives the mask's dtype and device.
    """
    by_block: dict[int, list[tuple[int, int, int]]] = {}
    for member in sorted(zip(slots, rows, lens, strict=True)):
        by_block.setdefault(member[0] // GROUP, []).append(member)
    for members in by_block.values():
        low, N = members[0][0], members[-1][0] - members[0][0] + 1
        longest = max(length for _, _, length in members)
        waste = N * longest - sum(length for _, _, length in members)
        if len(members) == 1 or waste > MAX_WASTE * len(members):
            continue
        own = torch.ones(
            N, dtype=torch.long
        )  # an idle slot sees one key: a softmax of nothing is not a number
        places = torch.tensor([slot - low for slot, _, _ in members])
        own[places] = torch.tensor([length for _, _, length in members])
        beyond = torch.arange(longest) >= own[:, None]  # [N, longest]
        mask = torch.zeros(N, longest).masked_fill_(beyond, -torch.inf).to(like)[:, None, None]
        row_of = torch.tensor([row for _, row, _ in members])
        yield Group(low, longest, row_of.to(like.device), places.to(like.device), mask)
