"""The ends of a decode step on the GPU: tokens that were chosen in the last step, and the choice of the next.
Part 13.

Promises what `sample` gives for greedy rows: the likeliest token, the lowest id among equals, and NO_TOKEN
where the likeliest logit is no finite number. Two launches, however many rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PART = 4096  # logits of a row that a program looks at


def fetch(given: Tensor, sources: Tensor, chosen: Tensor, out: Tensor) -> None:
    """out[S] = chosen[sources[S]] where there is a source, else given[S]. A source of -1 is none; a row that
    chose no token yields 0, so that nothing is read outside the embedding.
    """
    S = len(given)
    _fetch[(1,)](given, sources, chosen, out, S, PADDED=triton.next_power_of_2(S))


class Greedy:
    """logits[S, at least V] -> the likeliest tokens, in `chosen`[S]."""

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device) -> None:
        self.V, self.parts = vocab_size, triton.cdiv(vocab_size, PART)
        self.best = torch.empty(max_rows, self.parts, device=device)
        self.place = torch.empty(max_rows, self.parts, device=device, dtype=torch.int32)

    def __call__(self, logits: Tensor, chosen: Tensor) -> None:
        """logits[S, at least V], the rows some distance apart; the tokens go to chosen[:S]."""
        S = len(logits)
        best, place = self.best, self.place
        _best_of_part[(self.parts, S)](logits, best, place, logits.stride(0), V=self.V, PART=PART)
        _best[(S,)](best, place, chosen, PARTS=self.parts, PADDED=triton.next_power_of_2(self.parts))


@triton.jit
def _fetch(given, sources, chosen, out, S, PADDED: tl.constexpr):
    """One program, for all S rows."""
    i = tl.arange(0, PADDED)
    source = tl.load(sources + i, mask=i < S, other=-1)
    token = tl.load(given + i, mask=i < S, other=0)
    last = tl.load(chosen + source, mask=source >= 0, other=0)
    tl.store(out + i, tl.where(source >= 0, tl.maximum(last, 0), token), mask=i < S)


@triton.jit
def _best_of_part(logits, best, place, stride, V: tl.constexpr, PART: tl.constexpr):
    """Program (part, row): best[S, parts] and place[S, parts], the part's largest logit and its token."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = part * PART + tl.arange(0, PART)
    x = tl.load(logits + row * stride + token, mask=token < V, other=-float("inf")).to(tl.float32)
    x = tl.where(x == x, x, float("inf"))  # a maximum would pass over NaN
    value, index = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best + row * tl.num_programs(0) + part, value)
    tl.store(place + row * tl.num_programs(0) + part, part * PART + index)


@triton.jit
def _best(best, place, chosen, PARTS: tl.constexpr, PADDED: tl.constexpr):
    """Program (row): chosen[row] = the token of the best part, -1 where its logit is no finite number."""
    row, part = tl.program_id(0), tl.arange(0, PADDED)
    x = tl.load(best + row * PARTS + part, mask=part < PARTS, other=-float("inf"))
    value, index = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
    token = tl.load(place + row * PARTS + index).to(tl.int64)
    tl.store(chosen + row, tl.where(tl.abs(value) < float("inf"), token, -1))
