"""The record of a step, made of requests: which tokens, where they lie, which rows choose. Part 6."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from engine.cache.manager import KVCacheManager
from engine.decoding.sampling import Draw
from engine.requests.batch import NO_ADAPTER, UNSCORED, Batch, Draws, Rows
from engine.requests.request import Request

Work = Sequence[tuple[Request, int]]  # [S]: requests, and how many new tokens of each


class Spoken(NamedTuple):
    """What the rows of one sequence speak of: the first ones of `prompt_ids`, one each; the last `num_next`
    of tokens to be chosen.
    """

    prompt_ids: list[int]
    num_next: int


SpokenOf = Callable[[Request, range], Spoken]  # a request, and the positions of its tokens in the step


def next_tokens(request: Request, positions: range) -> Spoken:
    """A row speaks of the token that comes after its own. If nobody knows it yet, it is to be chosen: after
    the last of `request.token_ids`, and after each draft behind that one (Part 16).
    """
    last_known = len(request.token_ids) - 1
    return Spoken([], max(0, positions.stop - max(positions.start, last_known)))


def make_batch(
    work: Work,
    cache: KVCacheManager,
    adapter_slots: Mapping[str, int] | None = None,
    spoken_of: SpokenOf = next_tokens,
) -> Batch:
    """The next `n` uncomputed tokens of each (request, n), end to end, for which `cache` has reserved room.

    `adapter_slots`: by key, where an adapter lies (Part 18). `spoken_of` says which rows are wanted, and for
    what (Part 10 scores those of a prompt, too).
    """
    token_ids: list[int] = []
    positions: list[int] = []
    context_lens: list[int] = []
    query_start = (0, *accumulate(n for _, n in work))
    # Of each row that chooses: its token, how it is drawn, and which output token it gives.
    chosen: list[int] = []
    counts: list[int] = []
    draws: list[Draw] = []
    drawn_at: list[int] = []
    prompt: list[int] = []
    prompt_ids: list[int] = []
    prompt_counts: list[int] = []
    scored = False
    for (request, n), offset in zip(work, query_start, strict=False):
        start, end = request.num_computed_tokens, request.num_computed_tokens + n
        known = len(request.token_ids)
        params = request.params
        scored = scored or params.logprobs is not None or params.prompt_logprobs is not None
        context_lens.append(end)
        prompt_counts.append(0)
        if n == 1 and end == known:  # what follows does the same, slower
            token_ids.append(request.token_ids[start])
            positions.append(start)
            chosen.append(offset)
            counts.append(1)
            draws.append(request.sampling.draw())
            drawn_at.append(end - request.num_prompt_tokens)
            continue
        new = (
            request.token_ids[start:end] if end <= known else [*request.token_ids[start:], *request.draft_ids]
        )
        token_ids += new[:n]
        positions += range(start, end)
        spoken = spoken_of(request, range(start, end))
        prompt += range(offset, offset + len(spoken.prompt_ids))
        prompt_ids += spoken.prompt_ids
        prompt_counts[-1] = len(spoken.prompt_ids)
        counts.append(spoken.num_next)
        for i in range(spoken.num_next):
            row = n - spoken.num_next + i
            state, guesses = request.sampling, request.draft_ids[:i]  # penalties count them as output
            chosen.append(offset + row)
            draws.append((state.behind(guesses) if guesses and state.is_adjusted else state).draw())
            drawn_at.append(start + row + 1 - request.num_prompt_tokens)
    rows = Rows(tuple(chosen), tuple(counts))
    if scored:
        rows = replace(
            rows,
            logprobs=tuple(_asked(request.params.logprobs) for request, _ in work),
            prompt_logprobs=tuple(
                _asked(request.params.prompt_logprobs) if request.wants_every_row else UNSCORED
                for request, _ in work
            ),
            prompt=tuple(prompt),
            prompt_ids=tuple(prompt_ids),
            prompt_counts=tuple(prompt_counts),
        )
    ids = tuple(request.id for request, _ in work)
    tables, slots = cache.locate(ids, query_start, positions)
    adapters = adapter_slots or {}
    return Batch(
        ids,
        tuple(token_ids),
        tuple(positions),
        query_start,
        tuple(context_lens),
        tables,
        slots,
        cache.take_copies(),
        rows,
        Draws(tuple(draws), tuple(drawn_at)),
        tuple(NO_ADAPTER if request.adapter is None else adapters[request.adapter] for request, _ in work),
    )


def _asked(logprobs: int | None) -> int:
    return UNSCORED if logprobs is None else logprobs
