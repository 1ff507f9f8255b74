"""How long steps with drafts take, measured once, before the first request. Part 16.

Promises that the engine's own steps are measured, with all that goes on beside them: the proposer, steps
ahead, the host. Knows nothing of which drafts pay.
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
from engine.speculation.lengths import DraftLengths
from engine.speculation.step_times import StepTimes

SEQUENCES = (1, 2, 8, 32, 128)  # of a step that is measured: those up to max_num_seqs, and max_num_seqs
DRAFTS = (0, 1, 2, 4, 8)  # of each sequence: those up to the most that are proposed, and the most
REPEATS, STEPS = 3, 2  # the shortest time of so many repeats of so many steps counts
TIME_LIMIT = 1.0  # seconds: then measuring ends, once two numbers of sequences have been measured
PROMPT_TOKENS = 4  # of a dummy request
UNREAD_TOKENS = 64  # of the text that a proposer reads while `read_seconds` is measured
SPARE_TOKENS = 128  # that a cache reserves for a sequence beyond its own, at most: a block
MAX_STEPS = 100  # until a dummy request has its first token, or a step has the drafts it should have

ALWAYS_DRAFT = StepTimes((1,), (0, 1), ((1.0, 1.0),))  # drafts take no time: as many as may be are proposed
NEVER_DRAFT = StepTimes((1,), (0, 1), ((1.0, 1e9),))  # a draft takes for ever: none is proposed


class TrialEngine(Protocol):
    """What `measure` needs of the engine that it measures."""

    max_model_len: int
    config: ModelConfig

    def has_unfinished_requests(self) -> bool: ...
    def add_request(self, request_id: str, prompt: list[int], params: SamplingParams) -> None: ...
    def abort_request(self, request_id: str) -> RequestOutput | None: ...
    def step(self) -> list[RequestOutput]: ...


class SingleDraft(DraftLengths):
    """One draft for the first request, none for the others."""

    def choose(self, request_ids: Sequence[str], caps: Sequence[int]) -> list[int]:
        return [min(1, cap) if s == 0 else 0 for s, cap in enumerate(caps)]


class FullProposer:
    """Proposes what `proposer` does, filled up with token 0: so a step has as many drafts as were asked."""

    def __init__(self, proposer: Proposer) -> None:
        self.proposer = proposer

    @property
    def max_positions(self) -> float:
        return self.proposer.max_positions

    def unread(self, request: Request, ids: Sequence[int]) -> int:
        return self.proposer.unread(request, ids)

    def propose(self, texts: Sequence[Text], max_tokens: Sequence[int]) -> list[list[int]]:
        proposals = self.proposer.propose(texts, max_tokens)
        return [(ids + [0] * k)[:k] for ids, k in zip(proposals, max_tokens, strict=True)]


def measure(engine: TrialEngine, speculation: Speculation, max_num_seqs: int) -> StepTimes:
    """Run steps of dummy requests, and time them: from one landing to the next.

    `engine` has this `speculation`, and a plan and a scheduler of its own. All are thrown away afterwards,
    so what is left is dummy requests' keys and values in the runner's memory, in blocks that are free.
    Numbers of sequences and drafts for which there is no memory, or no time, are left out. ALWAYS_DRAFT if
    there is no memory for even one sequence with a draft.
    """
    end = time.perf_counter() + TIME_LIMIT
    trial = _Trial(engine, speculation)
    if not trial.fits(1, 1):
        return ALWAYS_DRAFT
    most = trial.max_drafts
    drafts = sorted({k for k in (*DRAFTS, most) if k <= most and trial.fits(1, k)})
    read_seconds = trial.read_seconds()
    # 1. The smallest and the largest number of sequences first, then those between.
    sizes = sorted({S for S in (*SEQUENCES, max_num_seqs) if max_num_seqs >= S and trial.fits(S, drafts[-1])})
    sizes = list(dict.fromkeys([sizes[0], sizes[-1], *sizes]))
    # 2. The shortest of all times, since other programs only add to one. All sizes come in each repeat, so
    #    that a slow moment of the machine does not spoil all times of one.
    shortest: dict[int, list[float]] = {}  # by S: [M], for each of `drafts`; then with a single draft
    for S in sizes * REPEATS:
        if len(shortest) >= min(2, len(sizes)) and time.perf_counter() > end:
            break
        times = [*(trial.seconds(S, k) for k in drafts), trial.single_draft_seconds(S)]
        shortest[S] = [min(pair) for pair in zip(times, shortest.get(S, times), strict=True)]
    trial.end()
    sizes = sorted(shortest)
    *columns, single = np.array([shortest[S] for S in sizes]).T  # M and one of [N]
    table = np.stack(columns, 1)  # [N, M]
    # 3. A smaller step takes no longer than a larger one did.
    table = np.minimum.accumulate(np.minimum.accumulate(table[::-1, ::-1], 0), 1)[::-1, ::-1]
    single = np.minimum(single, table[:, 1])
    return StepTimes(
        tuple(sizes), tuple(drafts), tuple(map(tuple, table.tolist())), read_seconds, tuple(single.tolist())
    )


class _Trial:
    """Dummy requests that decode in `engine`."""

    def __init__(self, engine: TrialEngine, speculation: Speculation) -> None:
        speculation.proposer = FullProposer(speculation.proposer)
        self.engine, self.speculation = engine, speculation
        self.max_drafts = speculation.lengths.max_drafts
        self.names: list[str] = []  # of the requests that run
        self.left = 0  # tokens that each of them may still get, at least

    def fits(self, S: int, k: int) -> bool:
        """Whether there is memory for S sequences while steps with k drafts each are measured."""
        tokens, total = PROMPT_TOKENS + _needed(k), self.speculation.scheduler.cache.usage().tokens_total
        return tokens <= self.engine.max_model_len and (S == 1 or S * (tokens + SPARE_TOKENS) <= total)

    def seconds(self, S: int, k: int) -> float:
        """Seconds of a step of S sequences with k drafts each."""
        if len(self.names) != S or self.left < _needed(k):
            self.begin(S, PROMPT_TOKENS)
        self.propose(k)
        self.step(S * k)  # not counted: it began while a step of another kind was under way
        return min(self.step(S * k) for _ in range(STEPS))

    def single_draft_seconds(self, S: int) -> float:
        """Seconds of a step of S sequences, the first of which has one draft, and the others none."""
        if len(self.names) != S or self.left < _needed(1):
            self.begin(S, PROMPT_TOKENS)
        self.speculation.lengths = SingleDraft(1, ALWAYS_DRAFT)
        self.step(1)
        return min(self.step(1) for _ in range(STEPS))

    def read_seconds(self) -> float:
        """Seconds that a proposer takes for each token that it has not read yet: the difference of two
        steps with a proposal behind them. Before the first it reads the whole text, before the second what
        came since.
        """
        num_tokens = min(UNREAD_TOKENS, self.engine.max_model_len - 3 * _needed(1))
        if num_tokens <= PROMPT_TOKENS:
            return 0.0
        per_token = []
        for _ in range(REPEATS):
            self.begin(1, num_tokens)
            times = []
            for _ in range(2):
                self.propose(0)
                self.step(0)
                self.propose(1)
                times.append(self.step(0))
                self.step(1)
            per_token.append((times[0] - times[1]) / num_tokens)
        return max(0.0, median(per_token))

    def begin(self, S: int, prompt: int) -> None:
        """Run S new requests, of `prompt` tokens, until each has its first token. Raises RuntimeError: some
        get none.
        """
        self.end()
        self.propose(0)
        self.left = min(self.engine.max_model_len - prompt, 3 * _needed(self.max_drafts))
        params = SamplingParams(temperature=0, max_tokens=self.left, ignore_eos=True)
        waiting = {f"trial {uuid4()}": i for i in range(S)}
        self.names = list(waiting)
        for name, i in waiting.items():
            token_ids = [(i + j) % self.engine.config.vocab_size for j in range(prompt)]
            self.engine.add_request(name, token_ids, params)
        for _ in range(MAX_STEPS + S):
            for output in self._outputs():
                if output.outputs[0].token_ids:
                    waiting.pop(output.request_id, None)
                    self.left -= output.request_id == self.names[0]
            if not waiting:
                return
        raise RuntimeError(f"measuring step times: {len(waiting)} of {S} requests get no token")

    def _outputs(self) -> list[RequestOutput]:
        """The outputs of the engine's next step. Raises RuntimeError: a dummy request failed."""
        outputs = self.engine.step()
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(f"measuring step times: {output.error}")
        return outputs

    def end(self) -> None:
        """Abort the requests, and run the step that is still under way."""
        for name in self.names:
            self.engine.abort_request(name)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        self.names = []

    def propose(self, k: int) -> None:
        """Have k drafts proposed for each request from now on."""
        self.speculation.lengths = DraftLengths(k, ALWAYS_DRAFT) if k else DraftLengths(1, NEVER_DRAFT)

    def step(self, drafts: int) -> float:
        """Run steps until one with so many drafts in all has landed: seconds since the landing before it.
        Raises RuntimeError: no step has so many.
        """
        tally = self.speculation.tally
        last_landing = time.perf_counter()
        for _ in range(MAX_STEPS):
            proposed_before = tally.proposed
            if not self._outputs():  # a step was launched, and none has landed
                continue
            landing = time.perf_counter()
            num_drafts = tally.proposed - proposed_before
            self.left -= 1 + num_drafts // len(self.names)
            if num_drafts == drafts:
                return landing - last_landing
            last_landing = landing
        raise RuntimeError(f"measuring step times: no step has {drafts} drafts")


def _needed(k: int) -> int:
    """Tokens that a sequence may get while steps with k drafts are measured, and in the steps before them."""
    return (STEPS + 4) * (k + 1)
