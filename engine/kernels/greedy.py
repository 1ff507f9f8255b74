"""The first and the last kernels of a decode step: one fetches the previous step's tokens, and the others
choose the next tokens greedily. Part 13.

Promises the tokens of `sample` for greedy rows: the token with the largest logit, the lowest id among equal
logits, and NO_TOKEN if the largest logit is not finite. Choosing takes two launches for any number of rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PART = 4096  # logits of a row that a program compares


def fetch(token_ids: Tensor, sources: Tensor, chosen: Tensor, out: Tensor) -> None:
    """out[S] = chosen[sources[S]], or token_ids[S] where the source is -1.

    `chosen` has the previous step's tokens. Where `chosen` is NO_TOKEN, out is 0, so that the model does not
    read outside its embedding table.
    """
    S = len(token_ids)
    _fetch[(1,)](token_ids, sources, chosen, out, S, PADDED=triton.next_power_of_2(S))


class Greedy:
    """Greedy sampling with the scratch memory that its two kernels need."""

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device) -> None:
        """`max_rows`: the most rows of a step."""
        self.V, self.parts = vocab_size, triton.cdiv(vocab_size, PART)
        # For each part of each row: the largest logit, and the token with this logit.
        self.best = torch.empty(max_rows, self.parts, device=device)
        self.best_token = torch.empty(max_rows, self.parts, device=device, dtype=torch.int32)

    def __call__(self, logits: Tensor, chosen: Tensor) -> None:
        """Write the tokens of logits[S, at least V] to chosen[:S]. Rows of `logits` may have any stride."""
        S = len(logits)
        best, best_token = self.best, self.best_token
        _best_of_part[(self.parts, S)](logits, best, best_token, logits.stride(0), V=self.V, PART=PART)
        _best[(S,)](best, best_token, chosen, PARTS=self.parts, PADDED=triton.next_power_of_2(self.parts))


@triton.jit
def _fetch(token_ids, sources, chosen, out, S, PADDED: tl.constexpr):
    """One program for all S rows: `fetch`. PADDED is a power of two, at least S."""
    row = tl.arange(0, PADDED)
    source = tl.load(sources + row, mask=row < S, other=-1)  # [PADDED]
    token = tl.load(token_ids + row, mask=row < S, other=0)  # [PADDED]
    last = tl.load(chosen + source, mask=source >= 0, other=0)  # [PADDED]
    # A negative last token (NO_TOKEN) becomes 0.
    tl.store(out + row, tl.where(source >= 0, tl.maximum(last, 0), token), mask=row < S)


@triton.jit
def _best_of_part(logits, best, best_token, stride, V: tl.constexpr, PART: tl.constexpr):
    """Program (part, row): the part's largest logit to best[S, parts], and its token to best_token[S, parts].
    `stride` is the distance of two rows of `logits`, in numbers.
    """
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = part * PART + tl.arange(0, PART)  # [PART]
    values = tl.load(logits + row * stride + token, mask=token < V, other=-float("inf")).to(tl.float32)
    # A maximum would skip NaN. As inf, NaN becomes the row's maximum, and `_best` then chooses no token.
    values = tl.where(values == values, values, float("inf"))  # only NaN is not equal to itself
    largest, index = tl.max(values, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best + row * tl.num_programs(0) + part, largest)
    tl.store(best_token + row * tl.num_programs(0) + part, part * PART + index)


@triton.jit
def _best(best, best_token, chosen, PARTS: tl.constexpr, PADDED: tl.constexpr):
    """Program (row): chosen[row] = the token of the part with the largest logit; -1 (NO_TOKEN) if this logit
    is not finite.
    """
    row, part = tl.program_id(0), tl.arange(0, PADDED)
    values = tl.load(best + row * PARTS + part, mask=part < PARTS, other=-float("inf"))  # [PADDED]
    largest, index = tl.max(values, 0, return_indices=True, return_indices_tie_break_left=True)
    token = tl.load(best_token + row * PARTS + index).to(tl.int64)
    tl.store(chosen + row, tl.where(tl.abs(largest) < float("inf"), token, -1))
