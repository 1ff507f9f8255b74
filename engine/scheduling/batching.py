"""Makes the record of a step from its requests: new tokens, where they lie, and the rows whose logits are
read. Part 6.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from engine.cache.manager import KVCacheManager
from engine.decoding.sampling_state import Draw, SamplingState
from engine.requests.batch import NO_ADAPTER, UNSCORED, Batch, Draws, Rows
from engine.requests.request import Request

Scheduled = Sequence[tuple[Request, int]]  # [S]: each request, and how many new tokens of it to compute


class LogitsRows(NamedTuple):
    """Which rows of logits are read for one sequence. Each of its new tokens has a row: the row of token i
    predicts token i + 1.
    """

    prompt_ids: list[int]  # [n]: the tokens of the prompt that are scored, in the sequence's first n rows
    num_sampled: int  # how many of the sequence's last rows a token is chosen from


SelectRows = Callable[[Request, range], LogitsRows]  # a request, the positions of its new tokens -> rows


def sampled_rows(request: Request, positions: range) -> LogitsRows:
    """The rows from which tokens are chosen: those of the last known token and of each draft behind it
    (Part 16). The token after any other new token is known already, so its row is not read. No row is scored.
    """
    last_known = len(request.token_ids) - 1
    first_sampled = max(positions.start, last_known)
    return LogitsRows(prompt_ids=[], num_sampled=max(0, positions.stop - first_sampled))


def make_batch(
    work: Scheduled,
    cache: KVCacheManager,
    adapter_slots: Mapping[str, int] | None = None,
    select_rows: SelectRows = sampled_rows,
) -> Batch:
    """Make the record of a step: for each (request, n) of `work`, the request's next n uncomputed tokens.

    `cache` must have reserved room for these tokens. `adapter_slots` gives each adapter's slot by the
    adapter's key (Part 18); None if no request has an adapter. `select_rows` chooses the rows whose logits
    are read; Part 10's `scored_rows` also has prompts scored.
    """
    columns = _Columns(len(work))
    # Under names of their own, since each look-up in `columns` would take time for each sequence.
    token_ids, positions, context_lens = columns.token_ids, columns.positions, columns.context_lens
    chosen, draws, draw_positions = columns.chosen, columns.draws, columns.draw_positions
    query_start = [0]  # [S+1]
    for request, n in work:
        offset = query_start[-1]
        query_start.append(offset + n)
        start = request.num_computed_tokens
        end = start + n
        if n == 1 and end == len(request.token_ids):
            # The most frequent case: the one new token is the last known token. `columns.add` would do the
            # same, but takes longer. So a change of `add`, or of what `select_rows` selects here, must also
            # be made in these lines. A token is chosen from the row of this token, and no token of the prompt
            # is scored in it. The counts in `columns` say so from the start.
            context_lens.append(end)
            token_ids.append(request.token_ids[start])
            positions.append(start)
            chosen.append(offset)
            sampling = request.sampling
            draws.append(sampling.draw() if sampling.is_adjusted else sampling.lasting_draw)
            draw_positions.append(end - request.num_prompt_tokens)
        else:
            columns.add(request, start, end, offset, select_rows)
    rows = Rows(tuple(chosen), tuple(columns.chosen_counts))
    if any([request.is_scored for request, _ in work]):
        rows = _with_rows_to_score(rows, work, columns)
    ids = tuple([request.id for request, _ in work])
    tables, slots = cache.locate(ids, query_start, positions)
    return Batch(
        ids=ids,
        token_ids=tuple(token_ids),
        positions=tuple(positions),
        query_start=tuple(query_start),
        context_lens=tuple(context_lens),
        tables=tables,
        slots=slots,
        copies=cache.take_copies(),
        rows=rows,
        draws=Draws(tuple(draws), tuple(draw_positions)),
        adapters=_adapters(work, adapter_slots) if adapter_slots else (NO_ADAPTER,) * len(work),
    )


class _Columns:
    """The lists of numbers in a record of S sequences. Sequences are added in order."""

    # Makes the look-ups of the lists faster: each step has several for each sequence.
    __slots__ = (
        "chosen", "chosen_counts", "context_lens", "draw_positions", "draws", "positions", "prompt_counts",
        "prompt_ids", "prompt_rows", "token_ids",
    )  # fmt: skip

    def __init__(self, S: int) -> None:
        """The two lists of counts have S entries from the start: for each sequence, one row to choose a token
        from, and none to score. `add` sets the entries of its sequence. The other lists are empty.
        """
        self.token_ids: list[int] = []  # [T]
        self.positions: list[int] = []  # [T]
        self.context_lens: list[int] = []  # [S]
        # Rows from which a token is chosen: the row's index in the step, how the token is drawn, and which
        # output token of the request it becomes.
        self.chosen: list[int] = []  # [R]
        self.chosen_counts = [1] * S  # [S]: how many of these rows each sequence has
        self.draws: list[Draw] = []  # [R]
        self.draw_positions: list[int] = []  # [R]
        # Rows in which a token of a prompt is scored: the row's index in the step, and that token.
        self.prompt_rows: list[int] = []  # [N]
        self.prompt_ids: list[int] = []  # [N]
        self.prompt_counts = [0] * S  # [S]: how many of these rows each sequence has

    def add(self, request: Request, start: int, end: int, offset: int, select_rows: SelectRows) -> None:
        """Add the next sequence, whose new tokens are at the positions start:end. `offset` is the row of the
        first of them in the step.
        """
        s = len(self.context_lens)  # the sequence's index
        self.context_lens.append(end)
        self.positions += range(start, end)
        known_ids = request.token_ids
        if end <= len(known_ids):
            self.token_ids += known_ids[start:end]
        else:  # drafts follow the known tokens (Part 16)
            self.token_ids += [*known_ids[start:], *request.draft_ids][: end - start]
        prompt_ids, num_sampled = select_rows(request, range(start, end))

        # 1. The last rows, from which tokens are chosen.
        self.chosen_counts[s] = num_sampled
        for num_drafts in range(num_sampled):  # how many drafts precede the token that is chosen
            position = end - num_sampled + num_drafts  # of the token that the row belongs to
            self.chosen.append(offset + position - start)
            self.draws.append(_sampling_after(request, num_drafts).draw())
            self.draw_positions.append(position + 1 - request.num_prompt_tokens)

        # 2. The first rows, in which tokens of the prompt are scored.
        num_scored = len(prompt_ids)
        self.prompt_counts[s] = num_scored
        self.prompt_rows += range(offset, offset + num_scored)
        self.prompt_ids += prompt_ids


def _with_rows_to_score(rows: Rows, work: Scheduled, columns: _Columns) -> Rows:
    """`rows` with the rows in which tokens of prompts are scored, and for each sequence, how many likeliest
    tokens to score beside a chosen token and beside a token of the prompt.
    """
    return replace(
        rows,
        logprobs=tuple(_num_likeliest(request.params.logprobs) for request, _ in work),
        prompt_logprobs=tuple(_num_likeliest_of_prompt(request) for request, _ in work),
        prompt_rows=tuple(columns.prompt_rows),
        prompt_ids=tuple(columns.prompt_ids),
        prompt_counts=tuple(columns.prompt_counts),
    )


def _adapters(work: Scheduled, adapter_slots: Mapping[str, int]) -> tuple[int, ...]:
    """[S]: the slot of each request's adapter, or NO_ADAPTER."""
    return tuple(
        NO_ADAPTER if request.adapter is None else adapter_slots[request.adapter] for request, _ in work
    )


def _sampling_after(request: Request, num_drafts: int) -> SamplingState:
    """The sampling state for the token after the request's first `num_drafts` drafts: penalties count these
    drafts as output.
    """
    state = request.sampling
    if num_drafts and state.is_adjusted:
        return state.with_drafts(request.draft_ids[:num_drafts])
    return state


def _num_likeliest(logprobs: int | None) -> int:
    """How many likeliest tokens to score; UNSCORED for None, which asks for no log probability."""
    return UNSCORED if logprobs is None else logprobs


def _num_likeliest_of_prompt(request: Request) -> int:
    """How many likeliest tokens to score beside each token of the request's prompt, or UNSCORED. Of n samples
    only the first has its prompt scored.
    """
    return _num_likeliest(request.params.prompt_logprobs) if request.wants_every_row else UNSCORED
