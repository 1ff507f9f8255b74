"""The record of one step's work: which tokens of which requests go through the model together. Part 6.

Immutable, on the host, passed as an argument: there is no global context. Several sequences lie end to end on
one flat token axis, without padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from engine.scheduling.request import Request


@dataclass(frozen=True, slots=True)
class Batch:
    """S sequences, T tokens."""

    requests: tuple[Request, ...]  # [S]
    # [T]; PLACEHOLDER stands for "the token sampled last", still on the device (Part 13)
    token_ids: tuple[int, ...]
    positions: tuple[int, ...]  # [T]
    query_start: tuple[int, ...]  # [S+1]: sequence s owns tokens query_start[s]:query_start[s+1]
    context_lens: tuple[int, ...]  # [S]: tokens in the cache once this step is done
    logit_rows: tuple[range, ...]  # [S]: tokens whose successor is wanted; none of an incomplete prompt

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def adapters(self) -> tuple[str | None, ...]:
        return tuple(request.adapter for request in self.requests)

    def num_new_tokens(self, s: int) -> int:
        """Tokens of sequence s in this step."""
        return self.query_start[s + 1] - self.query_start[s]


def make_batch(work: Sequence[tuple[Request, int]]) -> Batch:
    """The next `n` uncomputed tokens of each (request, n), end to end.

    Logits are wanted for a request's last token, and for each of its drafts' predecessors (Part 16), once the
    step reaches them. All prompt rows are wanted when prompt logprobs are asked for (Part 10).
    """
    token_ids: list[int] = []
    positions: list[int] = []
    context_lens: list[int] = []
    logit_rows: list[range] = []
    query_start = (0, *accumulate(n for _, n in work))
    for (request, n), offset in zip(work, query_start, strict=False):
        start, end = request.num_computed_tokens, request.num_computed_tokens + n
        known = len(request.token_ids)
        if n == 1 and end == known:  # what follows does the same, slower
            token_ids.append(request.token_ids[start])
            positions.append(start)
            context_lens.append(end)
            logit_rows.append(range(offset, offset + 1))
            continue
        new = (
            request.token_ids[start:end] if end <= known else [*request.token_ids[start:], *request.draft_ids]
        )
        token_ids += new[:n]
        positions += range(start, end)
        context_lens.append(end)
        first = 0 if request.wants_every_row and start < request.num_prompt_tokens else known - 1
        logit_rows.append(range(offset + max(first - start, 0), offset + n) if end > first else range(0))
    requests = tuple(request for request, _ in work)
    return Batch(
        requests, tuple(token_ids), tuple(positions), query_start, tuple(context_lens), tuple(logit_rows)
    )
