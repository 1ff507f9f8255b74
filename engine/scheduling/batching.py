"""Makes the record of a step from its requests: new tokens, and the rows whose logits are read. Part 6."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from engine.cache.manager import KVCacheManager
from engine.decoding.sampling import Draw, SamplingState
from engine.requests.batch import NO_ADAPTER, UNSCORED, Batch, Draws, Rows
from engine.requests.request import Request

Work = Sequence[tuple[Request, int]]  # [S]: each request, and how many new tokens of it to compute


class LogitsRows(NamedTuple):
    """Which logits of one sequence's new tokens are read. The logits at a token are those of the next token.

    The first len(prompt_ids) new tokens score the prompt's token that follows each. From the last
    `num_sampled` new tokens, the next token is chosen.
    """

    prompt_ids: list[int]  # the prompt's tokens that are scored
    num_sampled: int


SelectRows = Callable[[Request, range], LogitsRows]  # a request, the positions of its new tokens -> rows


def sampled_rows(request: Request, positions: range) -> LogitsRows:
    """The rows from which tokens are chosen: those of the last known token and of each draft behind it
    (Part 16). The token after any other new token is known already. No row is scored.
    """
    last_known = len(request.token_ids) - 1
    return LogitsRows([], max(0, positions.stop - max(positions.start, last_known)))


def make_batch(
    work: Work,
    cache: KVCacheManager,
    adapter_slots: Mapping[str, int] | None = None,
    select_rows: SelectRows = sampled_rows,
) -> Batch:
    """Make the record of a step: for each (request, n) of `work`, the request's next n uncomputed tokens.

    `cache` must have reserved room for these tokens. `adapter_slots` gives each adapter's slot by the
    adapter's key (Part 18); None if no request has an adapter. `select_rows` chooses the rows whose logits
    are read; Part 10's `scored_rows` also has prompts scored.
    """
    token_ids: list[int] = []  # [T]
    positions: list[int] = []  # [T]
    context_lens: list[int] = []  # [S]
    query_start = (0, *accumulate(n for _, n in work))
    # Rows from which a token is chosen: the row's index in the step, how the token is drawn, and which output
    # token of the request it becomes.
    chosen: list[int] = []  # [R]
    counts: list[int] = []  # [S]
    draws: list[Draw] = []  # [R]
    draw_positions: list[int] = []  # [R]
    # Rows that are scored: the row's index in the step, and the prompt's token that follows.
    scored_rows: list[int] = []  # [N]
    scored_ids: list[int] = []  # [N]
    num_scored = [0] * len(work)  # [S]
    is_scored = False  # whether a request asks for log probabilities
    for s, ((request, n), offset) in enumerate(zip(work, query_start, strict=False)):
        start, end = request.num_computed_tokens, request.num_computed_tokens + n
        is_scored = is_scored or request.is_scored
        context_lens.append(end)
        if n == 1 and end == len(request.token_ids):  # the most frequent case, made fast; same as below
            token_ids.append(request.token_ids[start])
            positions.append(start)
            chosen.append(offset)
            counts.append(1)
            draws.append(request.sampling.draw())
            draw_positions.append(end - request.num_prompt_tokens)
            continue
        token_ids += _new_tokens(request, start, end)
        positions += range(start, end)
        rows = select_rows(request, range(start, end))
        counts.append(rows.num_sampled)
        for i in range(rows.num_sampled):
            row = n - rows.num_sampled + i
            chosen.append(offset + row)
            draws.append(_sampling_after(request, i).draw())
            draw_positions.append(start + row + 1 - request.num_prompt_tokens)
        num_scored[s] = len(rows.prompt_ids)
        scored_rows += range(offset, offset + num_scored[s])
        scored_ids += rows.prompt_ids
    rows_read = Rows(tuple(chosen), tuple(counts))
    if is_scored:
        rows_read = replace(
            rows_read,
            logprobs=tuple(_num_likeliest(request.params.logprobs) for request, _ in work),
            prompt_logprobs=tuple(
                _num_likeliest(request.params.prompt_logprobs) if request.wants_every_row else UNSCORED
                for request, _ in work
            ),
            prompt=tuple(scored_rows),
            prompt_ids=tuple(scored_ids),
            prompt_counts=tuple(num_scored),
        )
    ids = tuple(request.id for request, _ in work)
    tables, slots = cache.locate(ids, query_start, positions)
    adapters = (NO_ADAPTER,) * len(work)
    if adapter_slots:
        adapters = tuple(
            NO_ADAPTER if request.adapter is None else adapter_slots[request.adapter] for request, _ in work
        )
    return Batch(
        ids=ids,
        token_ids=tuple(token_ids),
        positions=tuple(positions),
        query_start=query_start,
        context_lens=tuple(context_lens),
        tables=tables,
        slots=slots,
        copies=cache.take_copies(),
        rows=rows_read,
        draws=Draws(tuple(draws), tuple(draw_positions)),
        adapters=adapters,
    )


def _new_tokens(request: Request, start: int, end: int) -> list[int]:
    """The tokens start:end of a request's known tokens followed by its drafts."""
    if end <= len(request.token_ids):
        return request.token_ids[start:end]
    return [*request.token_ids[start:], *request.draft_ids][: end - start]


def _sampling_after(request: Request, num_drafts: int) -> SamplingState:
    """The sampling state for the token after `num_drafts` drafts: penalties count these drafts as output."""
    drafts, state = request.draft_ids[:num_drafts], request.sampling
    return state.behind(drafts) if drafts and state.is_adjusted else state


def _num_likeliest(logprobs: int | None) -> int:
    """How many likeliest tokens to score; UNSCORED for None, which asks for no log probability."""
    return UNSCORED if logprobs is None else logprobs
