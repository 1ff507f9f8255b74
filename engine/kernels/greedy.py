"""The first and the last kernels of a decode step: the tokens that the last step chose go in, and the
likeliest next tokens come out. Part 13.

Promises what `sample` gives for greedy rows: the likeliest token, the lowest id among equals, and NO_TOKEN
where the likeliest logit is no finite number. Two launches, however many rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PART = 4096  # logits of a row that a program compares


def fetch(token_ids: Tensor, sources: Tensor, chosen: Tensor, out: Tensor) -> None:
    """out[S] = chosen[sources[S]], or token_ids[S] where the source is -1. Where the last step chose no token
    (NO_TOKEN), out is 0, so that nothing outside the embedding is read.
    """
    S = len(token_ids)
    _fetch[(1,)](token_ids, sources, chosen, out, S, PADDED=triton.next_power_of_2(S))


class Greedy:
    """The likeliest token of each row, with the scratch memory that its two kernels need."""

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device) -> None:
        self.V, self.parts = vocab_size, triton.cdiv(vocab_size, PART)
        # Of each part of a row: its largest logit, and the token that has it.
        self.best = torch.empty(max_rows, self.parts, device=device)
        self.best_token = torch.empty(max_rows, self.parts, device=device, dtype=torch.int32)

    def __call__(self, logits: Tensor, chosen: Tensor) -> None:
        """logits[S, V or more], whose rows may lie apart; the tokens go to chosen[:S]."""
        S = len(logits)
        best, best_token = self.best, self.best_token
        _best_of_part[(self.parts, S)](logits, best, best_token, logits.stride(0), V=self.V, PART=PART)
        _best[(S,)](best, best_token, chosen, PARTS=self.parts, PADDED=triton.next_power_of_2(self.parts))


@triton.jit
def _fetch(token_ids, sources, chosen, out, S, PADDED: tl.constexpr):
    """One program, for all S rows."""
    i = tl.arange(0, PADDED)
    source = tl.load(sources + i, mask=i < S, other=-1)  # [PADDED]
    token = tl.load(token_ids + i, mask=i < S, other=0)  # [PADDED]
    last = tl.load(chosen + source, mask=source >= 0, other=0)  # [PADDED]
    tl.store(out + i, tl.where(source >= 0, tl.maximum(last, 0), token), mask=i < S)


@triton.jit
def _best_of_part(logits, best, best_token, stride, V: tl.constexpr, PART: tl.constexpr):
    """Program (part, row): best and best_token[S, parts], the part's largest logit and the token of it."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = part * PART + tl.arange(0, PART)  # [PART]
    x = tl.load(logits + row * stride + token, mask=token < V, other=-float("inf")).to(tl.float32)
    x = tl.where(x == x, x, float("inf"))  # NaN, which a maximum would skip, becomes infinite: no token
    value, index = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best + row * tl.num_programs(0) + part, value)
    tl.store(best_token + row * tl.num_programs(0) + part, part * PART + index)


@triton.jit
def _best(best, best_token, chosen, PARTS: tl.constexpr, PADDED: tl.constexpr):
    """Program (row): chosen[row] = the token of the best part, -1 where its logit is no finite number."""
    row, part = tl.program_id(0), tl.arange(0, PADDED)
    x = tl.load(best + row * PARTS + part, mask=part < PARTS, other=-float("inf"))  # [PADDED]
    value, index = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
    token = tl.load(best_token + row * PARTS + index).to(tl.int64)
    tl.store(chosen + row, tl.where(tl.abs(value) < float("inf"), token, -1))
