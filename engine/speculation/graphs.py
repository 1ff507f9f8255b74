"""Passes that verify, and passes that propose, as CUDA graphs. Part 16.

A pass of n + 1 tokens of a sequence is n + 1 rows of a decode step: each row has its own token, place and
length, and all the same block table. So Part 13's graphs serve, if a row sees the rows above it, which are
stored in the same pass. `ModelStep` stores all rows before any attends; for GPT-2 so does `VerifyRows`.

A target's passes without drafts have graphs of their own, those of Part 13: what lets rows see one another
takes time.

Promises the logits of `ModelForward` up to rounding. A pass of more than so many rows, or with a long piece
of somebody's prompt, goes the usual way.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from engine.ahead import AheadForward, LastTokens
from engine.attention.paged import Pages
from engine.batch import Batch
from engine.cache.paged import PagedCache
from engine.device import on_device
from engine.graphs import DecodeGraphs, GraphForward, ModelStep, Step
from engine.kernels.go_on import go_on
from engine.kernels.many_rows import ManyRows
from engine.kernels.prompt_rows import prompts
from engine.kernels.single_row import SingleRow
from engine.kernels.verify_attend import MOST_NEW, VerifyAttend
from engine.scheduling.request import PLACEHOLDER
from engine.speculation.config import MOST_TOKENS

CHAIN = MOST_TOKENS + 1  # passes of a draft model that follow one another before the host waits
MOST_ROWS = 256  # of a pass that is a graph, if there are no more sequences than that

MakeSteps = Callable[[nn.Module, PagedCache, int], Callable[[int], Step]]


def num_rows(max_num_seqs: int, new: int, max_num_batched_tokens: int) -> int:
    """Rows of the largest graph, for sequences with up to `new` tokens each: one token of each is there."""
    return min(max_num_batched_tokens, max(max_num_seqs, min(MOST_ROWS, max_num_seqs * new)))


class VerifyRows(ManyRows):
    """GPT-2's forward pass of S ≤ max_rows tokens, of which several may be one sequence's."""

    def __init__(self, model: nn.Module, keys: list[Tensor], values: list[Tensor], max_rows: int) -> None:
        super().__init__(model, keys, values, max_rows)
        config = self.config
        self.attend = VerifyAttend(config.num_heads, config.head_dim, self.x.device, max_rows)


def steps(model: nn.Module, cache: PagedCache, max_rows: int) -> Callable[[int], Step]:
    """How a pass of so many rows is computed: by the fastest way that fits the model, and in which rows of a
    sequence see one another. One row has no neighbours.
    """
    memory = list(cache.keys), list(cache.values)
    if not SingleRow.fits(model):
        step = ModelStep(model, *memory)
        return lambda rows: step
    one, many = SingleRow(model, *memory), VerifyRows(model, *memory, max_rows)
    return lambda rows: one if rows == 1 else many


class PassGraphs(DecodeGraphs):
    """Graphs for a draft model's passes, and for the step from one pass to the next where each row goes on
    with its token. In between nobody gets a block: the tables stay those of the last pass.
    """

    def __init__(self, *options, block_size: int, **more) -> None:
        self._block_size = block_size
        self._steps_on: dict[int, Callable[[], None]] = {}
        self._size = 0  # of the last pass
        super().__init__(*options, **more)

    def __call__(self, batch: Batch, cache: PagedCache) -> Tensor:
        self._size = next(size for size in self.sizes if size >= batch.num_tokens)
        return super().__call__(batch, cache)

    def again(self, rows: int) -> Tensor:
        """The pass behind the last one, which had so many rows, each of a sequence of its own."""
        self._steps_on.get(self._size, self._go_on)()
        if self._size in self._graphs:
            replay, logits = self._graphs[self._size]
            replay()
        else:
            logits = self._run(self._size)
        return logits[:rows]

    def _pages(self, batch: Batch, cache: PagedCache) -> Pages:
        """With all blocks that are theirs: the passes that follow write there."""
        tables = [cache.held[request.id].table.blocks for request in batch.requests]
        pages = Pages.of(tables, [len(table) * self._block_size for table in tables], self._block_size)
        return pages.by_row(np.diff(batch.query_start), np.array(batch.positions))

    def _go_on(self) -> None:
        given, sources, positions, slots, lens, tables = self._views(self._inputs, self._size)
        go_on(given, sources, positions, slots, lens, tables, self._last.chosen, self._block_size)

    def _capture(self) -> None:
        super()._capture()
        for size in self.sizes:
            self._size = size
            self._go_on()  # compiled before it is recorded
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._go_on()
            self._steps_on[size] = graph.replay


class RowsForward(AheadForward):
    """Batch -> logits[R, V], by a graph if it has few tokens, whosever they are."""

    def __init__(
        self, model: nn.Module, cache: PagedCache, max_rows: int, max_model_len: int, capture: bool,
        make_steps: MakeSteps = steps, make_prompts: Callable[[nn.Module], Callable] = prompts,
        chains: bool = False, make_plain: MakeSteps | None = None, plain_rows: int = 0,
    ) -> None:  # fmt: skip
        """`make_steps` and `make_prompts`: as for `GraphForward`; a later part knows more models. `chains`:
        up to CHAIN passes follow one another with room for all of them from the start, as a draft model's do;
        a target's steps do not, even one ahead: a sequence may get a block before any of them. `make_plain`:
        graphs of their own, for passes of up to `plain_rows` sequences with one new token each.
        """
        device = next(model.parameters()).device
        super().__init__(model, cache, LastTokens(max_rows, device))
        self._run = make_prompts(model)
        self._V = model.config.vocab_size
        width = cache.num_blocks_for(max_model_len)
        step = make_steps(model, cache, max_rows)
        options = step, self.last, self._V, max_rows, width, capture
        self.graphs = (
            PassGraphs(*options, in_flight=CHAIN, block_size=cache.block_size)
            if chains
            else DecodeGraphs(*options)
        )
        self.plain: DecodeGraphs | None = None
        if make_plain is not None:
            plain = make_plain(model, cache, plain_rows)
            self.plain = DecodeGraphs(plain, self.last, self._V, plain_rows, width, capture)
        self._before: Batch | None = None  # the last pass, if each of its rows may go on with its token
        self._chosen_from: Tensor | None = None  # the logits whose likeliest tokens are in `last.chosen`

    @torch.inference_mode()
    def __call__(self, batch: Batch) -> Tensor:
        T = batch.num_tokens
        most_new = max(map(batch.num_new_tokens, range(len(batch.requests))))
        if self.graphs.sizes[-1] < T or most_new > MOST_NEW:
            self._before = self._chosen_from = None
            return super().__call__(batch)
        if self._before is not None and _goes_on(batch, self._before):
            logits = self.graphs.again(T)
        else:
            plain = self.plain is not None and most_new == 1 and self.plain.sizes[-1] >= T
            logits = (self.plain if plain else self.graphs)(batch, self.cache)
        logits = logits[:, : self._V]  # [T, V]
        rows = [row for own in batch.logit_rows for row in own]
        if len(rows) != T:
            self._before = self._chosen_from = None
            return logits[on_device(self.device, rows)[0]]
        self._before = batch if isinstance(self.graphs, PassGraphs) and most_new == 1 else None
        self._chosen_from = logits
        return logits

    choose = GraphForward.choose  # the sampler of passes in which nobody has drafts

    def likeliest(self, logits: Tensor) -> Tensor:
        """logits[R, V] -> token ids[R]: the graph's own choice, until its next pass, if they are of its last
        one.
        """
        return self.last.chosen[: len(logits)] if logits is self._chosen_from else logits.argmax(-1)


def _goes_on(batch: Batch, before: Batch) -> bool:
    """Whether each row of a pass goes on, in the next, with the token that was chosen from it."""
    return len(batch.requests) == len(before.requests) == batch.num_tokens and all(
        request is same and token_id == PLACEHOLDER and position == last + 1
        for request, same, token_id, position, last in zip(
            batch.requests, before.requests, batch.token_ids, batch.positions, before.positions, strict=True
        )
    )
