"""What steps with drafts cost, measured once, before the first request. Part 16.

Promises that what is measured is the engine's own steps, with all that goes on beside them: who proposes,
steps ahead, the host. Knows nothing of what pays.
"""

import time
from collections.abc import Sequence
from statistics import median
from typing import Protocol
from uuid import uuid4

import numpy as np

from engine.decoding.outputs import RequestOutput
from engine.decoding.params import SamplingParams
from engine.models.config import ModelConfig
from engine.requests.request import Request
from engine.speculation.capability import Proposer, Speculation, Text
from engine.speculation.costs import CostTable
from engine.speculation.lengths import Lengths

SEQUENCES = (1, 2, 8, 32, 128)  # measured, as far as there are seats; and as many as there are
DRAFTS = (0, 1, 2, 4, 8)  # measured, up to the most, and the most
ROUNDS, STEPS = 3, 2  # a cost is the shortest time of so many rounds of so many steps
SECONDS = 1.0  # then it ends, once two crowds have been measured
PROMPT, READ = 4, 64  # tokens of a dummy request; and of one that a proposer has to catch up with
BLOCK = 128  # tokens that a sequence holds beyond what it needs, at most
PATIENCE = 100  # steps, at most, until what is to be measured comes

FREE = CostTable((1,), (0, 1), ((1.0, 1.0),))  # as many drafts as may be
DEAR = CostTable((1,), (0, 1), ((1.0, 1e9),))  # none


class TrialEngine(Protocol):
    """An engine that is made to be measured, and thrown away."""

    max_model_len: int
    config: ModelConfig

    def has_unfinished_requests(self) -> bool: ...
    def add_request(self, request_id: str, prompt: list[int], params: SamplingParams) -> None: ...
    def abort_request(self, request_id: str) -> RequestOutput | None: ...
    def step(self) -> list[RequestOutput]: ...


class FirstAlone(Lengths):
    """A draft for the first, none for the others."""

    def choose(self, request_ids: Sequence[str], caps: Sequence[int]) -> list[int]:
        return [min(1, cap) if s == 0 else 0 for s, cap in enumerate(caps)]


class FullProposer:
    """Proposes what `proposer` does, and zeros behind it: so a step has as many drafts as it is to have."""

    def __init__(self, proposer: Proposer) -> None:
        self.proposer = proposer

    @property
    def max_positions(self) -> float:
        return self.proposer.max_positions

    def unread(self, request: Request, ids: Sequence[int]) -> int:
        return self.proposer.unread(request, ids)

    def propose(self, texts: Sequence[Text], most: Sequence[int]) -> list[list[int]]:
        proposals = self.proposer.propose(texts, most)
        return [(ids + [0] * k)[:k] for ids, k in zip(proposals, most, strict=True)]


def measure(engine: TrialEngine, speculation: Speculation, max_num_seqs: int) -> CostTable:
    """What steps of dummy requests take, from one landing to the next.

    `engine` has this `speculation`, and a plan and a scheduler of its own, which are thrown away with it: so
    nothing is left but what lies in its runner's memory, which is nobody's. Crowds for which there is no
    room, or no time, are left out. FREE where not even one sequence can be seen with a draft.
    """
    end = time.perf_counter() + SECONDS
    trial = _Trial(engine, speculation)
    if not trial.fits(1, 1):
        return FREE
    drafts = sorted({k for k in (*DRAFTS, trial.most) if k <= trial.most and trial.fits(1, k)})
    token_read = trial.token_read()
    # 1. One sequence and as many as there are seats, then what lies between.
    sizes = sorted({S for S in (*SEQUENCES, max_num_seqs) if max_num_seqs >= S and trial.fits(S, drafts[-1])})
    sizes = list(dict.fromkeys([sizes[0], sizes[-1], *sizes]))
    # 2. The shortest of all times: other programs only add to one. In rounds: so that a bad moment is not all
    #    that is seen of a step.
    table: dict[int, list[float]] = {}  # and behind them, where one alone has a draft
    for S in sizes * ROUNDS:
        if len(table) >= min(2, len(sizes)) and time.perf_counter() > end:
            break
        row = [*(trial.seconds(S, k) for k in drafts), trial.one_draft(S)]
        table[S] = [min(pair) for pair in zip(row, table.get(S, row), strict=True)]
    trial.end()
    sizes = sorted(table)
    *columns, one_draft = np.array([table[S] for S in sizes]).T
    times = np.stack(columns, 1)  # [N, M]
    # 3. A smaller step takes no longer than a larger one did.
    times = np.minimum.accumulate(np.minimum.accumulate(times[::-1, ::-1], 0), 1)[::-1, ::-1]
    one_draft = np.minimum(one_draft, times[:, 1])
    return CostTable(
        tuple(sizes), tuple(drafts), tuple(map(tuple, times.tolist())), token_read, tuple(one_draft.tolist())
    )


class _Trial:
    """Dummy requests that decode."""

    def __init__(self, engine: TrialEngine, speculation: Speculation) -> None:
        speculation.proposer = FullProposer(speculation.proposer)
        self.engine, self.speculation = engine, speculation
        self.most, self.names = speculation.lengths.most, list[str]()
        self.left = 0  # tokens that each may still get, at least

    def fits(self, S: int, k: int) -> bool:
        """Whether there is room for so many sequences while steps with so many drafts are seen."""
        tokens, total = PROMPT + _needed(k), self.speculation.scheduler.cache.usage().tokens_total
        return tokens <= self.engine.max_model_len and (S == 1 or S * (tokens + BLOCK) <= total)

    def seconds(self, S: int, k: int) -> float:
        """Of a step of S sequences with k drafts each."""
        if len(self.names) != S or self.left < _needed(k):
            self.begin(S, PROMPT)
        self.propose(k)
        self.step(S * k)  # begun while the one before was of another kind
        return min(self.step(S * k) for _ in range(STEPS))

    def one_draft(self, S: int) -> float:
        """Of a step of S sequences the first of which has a draft, and nobody else."""
        if len(self.names) != S or self.left < _needed(1):
            self.begin(S, PROMPT)
        self.speculation.lengths = FirstAlone(1, FREE)
        self.step(1)
        return min(self.step(1) for _ in range(STEPS))

    def token_read(self) -> float:
        """What a proposal costs more, by each token of a text that was not read before."""
        tokens = min(READ, self.engine.max_model_len - 3 * _needed(1))
        if tokens <= PROMPT:
            return 0.0
        more = []
        for _ in range(ROUNDS):
            self.begin(1, tokens)
            times = []
            for _ in range(2):  # the text, then what has come since
                self.propose(0)
                self.step(0)
                self.propose(1)
                times.append(self.step(0))
                self.step(1)
            more.append((times[0] - times[1]) / tokens)
        return max(0.0, median(more))

    def begin(self, S: int, prompt: int) -> None:
        """So many new requests, until each has its first token."""
        self.end()
        self.propose(0)
        self.left = min(self.engine.max_model_len - prompt, 3 * _needed(self.most))
        params = SamplingParams(temperature=0, max_tokens=self.left, ignore_eos=True)
        waiting = {f"trial {uuid4()}": i for i in range(S)}
        self.names = list(waiting)
        for name, i in waiting.items():
            token_ids = [(i + j) % self.engine.config.vocab_size for j in range(prompt)]
            self.engine.add_request(name, token_ids, params)
        for _ in range(PATIENCE + S):
            for output in self._outputs():
                if output.outputs[0].token_ids:
                    waiting.pop(output.request_id, None)
                    self.left -= output.request_id == self.names[0]
            if not waiting:
                return
        raise RuntimeError(f"to measure what drafts cost: {len(waiting)} of {S} requests get no token")

    def _outputs(self) -> list[RequestOutput]:
        """Of the next step. Raises RuntimeError: a dummy request failed."""
        outputs = self.engine.step()
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(f"to measure what drafts cost: {output.error}")
        return outputs

    def end(self) -> None:
        for name in self.names:
            self.engine.abort_request(name)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        self.names = []

    def propose(self, k: int) -> None:
        """From now on k drafts for each."""
        self.speculation.lengths = Lengths(k, FREE) if k else Lengths(1, DEAR)

    def step(self, drafts: int) -> float:
        """Until a step with so many drafts in all has landed: the time since the landing before it."""
        tally = self.speculation.tally
        start = time.perf_counter()
        for _ in range(PATIENCE):
            before = tally.proposed
            if not self._outputs():  # launched, and none has landed
                continue
            now = time.perf_counter()
            self.left -= 1 + (tally.proposed - before) // len(self.names)
            if tally.proposed - before == drafts:
                return now - start
            start = now
        raise RuntimeError(f"to measure what drafts cost: no step has {drafts} of them")


def _needed(k: int) -> int:
    """Tokens that a sequence may get while steps with k drafts are seen, with those that go before."""
    return (STEPS + 4) * (k + 1)
