"""How long steps with drafts take, measured once, before the first request. Part 16.

The measured steps are the engine's own, with all their other work: the proposer, steps ahead, the host. This
module does not know which drafts pay.
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
from engine.speculation.capability import Proposer, ProposerInput, Speculation
from engine.speculation.lengths import DraftLengths
from engine.speculation.step_times import StepTimes

# The numbers of sequences and of drafts to measure. Numbers above the engine's largest are left out, and the
# engine's largest is measured, too, if it fits. From 1 on, each is two to four times the one before it;
# `StepTimes` interpolates between them.
SEQUENCES = (1, 2, 8, 32, 128)
DRAFTS = (0, 1, 2, 4, 8)  # of each sequence
REPEATS = 3  # the shortest time of all repeats and all steps counts
STEPS = 2  # timed steps in a repeat
TIME_LIMIT = 1.0  # seconds after which measuring ends, if two numbers of sequences have been measured
PROMPT_TOKENS = 4  # the length of a dummy request's prompt
UNREAD_TOKENS = 64  # the length of the text that a proposer reads while `read_seconds` is measured
SPARE_TOKENS = 128  # the most tokens that a cache reserves for a sequence beyond its known ones: a block
# The most steps until a step has its drafts, or, with one more for each dummy request, until all of them
# have their first token.
MAX_STEPS = 100

# Tables in which drafts take no time, so the most are proposed, and in which they take so long that none is.
ALWAYS_DRAFT = StepTimes(sequences=(1,), drafts=(0, 1), step_seconds=((1.0, 1.0),))
NEVER_DRAFT = StepTimes(sequences=(1,), drafts=(0, 1), step_seconds=((1.0, 1e9),))


class TrialEngine(Protocol):
    """The part of an engine that `measure` uses."""

    max_model_len: int
    config: ModelConfig

    def has_unfinished_requests(self) -> bool: ...
    def add_request(self, request_id: str, prompt: list[int], params: SamplingParams) -> None: ...
    def abort_request(self, request_id: str) -> RequestOutput | None: ...
    def step(self) -> list[RequestOutput]: ...


class SingleDraft(DraftLengths):
    """Chooses one draft for the first request, and none for the others."""

    def choose(self, request_ids: Sequence[str], caps: Sequence[int]) -> list[int]:
        lengths = [0] * len(caps)
        if caps:
            lengths[0] = min(1, caps[0])
        return lengths


class FullProposer:
    """A `Proposer` that fills up the proposals of `proposer` with token 0, so that a step has the most drafts
    that it may have.
    """

    def __init__(self, proposer: Proposer) -> None:
        self.proposer = proposer

    @property
    def max_positions(self) -> float:
        return self.proposer.max_positions

    def num_unread(self, request: Request, ids: Sequence[int]) -> int:
        return self.proposer.num_unread(request, ids)

    def propose(self, inputs: Sequence[ProposerInput]) -> list[list[int]]:
        full: list[list[int]] = []
        for proposal, item in zip(self.proposer.propose(inputs), inputs, strict=True):
            num_missing = item.max_tokens - len(proposal)
            full.append(proposal + [0] * num_missing)
        return full


def measure(
    engine: TrialEngine, speculation: Speculation, max_num_seqs: int, max_num_batched_tokens: int
) -> StepTimes:
    """Run steps of dummy requests, and time each step from the last landing to its own.

    `engine` must have this `speculation`, and a plan and a scheduler of its own. The caller throws all of
    them away afterwards: what stays is the dummy requests' keys and values in the runner's memory, in free
    blocks. Numbers of sequences and of drafts for which there is no memory, no time or no room in a step
    are left out.

    Returns ALWAYS_DRAFT if max_model_len or a step is too short for one sequence with a draft. Raises
    RuntimeError if a dummy request fails, or gets no token or no drafts.
    """
    deadline = time.perf_counter() + TIME_LIMIT
    trial = _Trial(engine, speculation, max_num_batched_tokens)
    if not trial.fits(1, 1):
        return ALWAYS_DRAFT
    max_drafts = trial.max_drafts
    drafts = sorted(k for k in {*DRAFTS, max_drafts} if k <= max_drafts and trial.fits(1, k))
    read_seconds = trial.read_seconds()
    # 1. Measure the smallest and the largest number of sequences first, then those between.
    numbers = {*SEQUENCES, max_num_seqs}
    fitting = sorted(S for S in numbers if max_num_seqs >= S and trial.fits(S, drafts[-1]))
    in_order = list(dict.fromkeys([fitting[0], fitting[-1], *fitting]))  # each once
    # 2. Keep the shortest of all times, since other programs can only make a step slower. Each repeat
    #    measures all numbers, so that a slow moment of the machine does not spoil all times of one of them.
    shortest: dict[int, np.ndarray] = {}  # by S: [M + 1], for each of `drafts`, then for a single draft
    for S in in_order * REPEATS:
        if len(shortest) >= min(2, len(in_order)) and time.perf_counter() > deadline:
            break
        seconds = [trial.seconds(S, k) for k in drafts]
        times = np.array([*seconds, trial.single_draft_seconds(S)])
        shortest[S] = np.minimum(times, shortest.get(S, times))
    trial.stop()
    sequences = sorted(shortest)
    measured = np.array([shortest[S] for S in sequences])  # [N, M + 1]
    table, single = measured[:, :-1], measured[:, -1]  # [N, M], [N]
    # 3. Timing noise may make a larger step look faster than a smaller one. So lower each entry to the least
    #    entry below or right of it, and the time of a single draft to that of one draft for each sequence.
    for axis in (0, 1):
        table = _lowered(table, axis)
    single = np.minimum(single, table[:, 1])  # drafts[1] is 1
    return StepTimes(
        sequences=tuple(sequences),
        drafts=tuple(drafts),
        step_seconds=tuple(map(tuple, table.tolist())),
        read_seconds=read_seconds,
        single_draft_seconds=tuple(single.tolist()),
    )


def _lowered(table: np.ndarray, axis: int) -> np.ndarray:
    """A table in which each entry is the least of itself and of all behind it along `axis`."""
    from_the_end = np.flip(table, axis)
    return np.flip(np.minimum.accumulate(from_the_end, axis), axis)


class _Trial:
    """Dummy requests that decode in `engine`. They change `speculation`: its proposer, and its `lengths` with
    each kind of step.
    """

    def __init__(self, engine: TrialEngine, speculation: Speculation, max_num_batched_tokens: int) -> None:
        speculation.proposer = FullProposer(speculation.proposer)
        self.engine, self.speculation = engine, speculation
        self.max_drafts = speculation.lengths.max_drafts
        self.max_num_batched_tokens = max_num_batched_tokens
        self.request_ids: list[str] = []  # of the requests that run
        self.min_tokens_left = 0  # tokens until the first of them ends

    def fits(self, S: int, k: int) -> bool:
        """Whether a step has room for S sequences with k drafts each, and they can grow as long as needed to
        measure such steps, within max_model_len and the cache. For one sequence, the cache always has room
        for max_model_len tokens.
        """
        tokens = PROMPT_TOKENS + _num_tokens(k)
        if tokens > self.engine.max_model_len or S * (k + 1) > self.max_num_batched_tokens:
            return False
        return S == 1 or S * (tokens + SPARE_TOKENS) <= self.speculation.scheduler.cache.usage().tokens_total

    def seconds(self, S: int, k: int) -> float:
        """The seconds of a step of S sequences with k drafts each."""
        self.run_requests(S, k)
        self.set_num_drafts(k)
        return self.shortest_step(S * k)

    def single_draft_seconds(self, S: int) -> float:
        """The seconds of a step of S sequences, of which the first has one draft, and the others none."""
        self.run_requests(S, 1)
        self.speculation.lengths = SingleDraft(1, ALWAYS_DRAFT)
        return self.shortest_step(1)

    def run_requests(self, S: int, k: int) -> None:
        """Have S requests run that can take k drafts in each step that is measured."""
        if len(self.request_ids) != S or self.min_tokens_left < _num_tokens(k):
            self.start(S, PROMPT_TOKENS)

    def shortest_step(self, total_drafts: int) -> float:
        """The seconds of the shortest of STEPS steps with `total_drafts` drafts."""
        self.step(total_drafts)  # not timed, since it began while a step of another kind was in flight
        times = [self.step(total_drafts) for _ in range(STEPS)]
        return min(times)

    def read_seconds(self) -> float:
        """The seconds that a proposer takes to read one unread token.

        This is the difference of two plain steps after which the proposer proposes, divided by the text's
        tokens. In the first, the proposer reads the whole text; in the second, only the tokens since then.
        """
        # The output of both rounds needs room behind the text: less than three measurements of one draft.
        num_tokens = min(UNREAD_TOKENS, self.engine.max_model_len - 3 * _num_tokens(1))
        if num_tokens <= PROMPT_TOKENS:
            return 0.0
        seconds_per_token = []
        for _ in range(REPEATS):
            self.start(1, num_tokens)
            times = []
            for _ in range(2):
                self.set_num_drafts(0)
                self.step(0)  # not timed; no draft is proposed, so nothing is read
                self.set_num_drafts(1)
                times.append(self.step(0))  # a plain step, after which the proposer reads and proposes
                self.step(1)  # verifies the draft; all of the text has been read
            seconds_per_token.append((times[0] - times[1]) / num_tokens)
        return max(0.0, median(seconds_per_token))  # noise may make the difference negative

    def start(self, S: int, num_prompt_tokens: int) -> None:
        """Abort the requests that run, and run S new ones with prompts of `num_prompt_tokens` tokens until
        each has its first output token. Raises RuntimeError if a request gets none in MAX_STEPS + S steps.
        """
        self.stop()
        self.set_num_drafts(0)
        # DRAFTS about double from one to the next, so all together need about three times the last one's
        # tokens.
        max_tokens = 3 * _num_tokens(self.max_drafts)
        self.min_tokens_left = min(self.engine.max_model_len - num_prompt_tokens, max_tokens)
        params = SamplingParams(temperature=0, max_tokens=self.min_tokens_left, ignore_eos=True)
        self.request_ids = [f"trial {uuid4()}" for _ in range(S)]
        for i, request_id in enumerate(self.request_ids):  # the prompts differ
            token_ids = [(i + j) % self.engine.config.vocab_size for j in range(num_prompt_tokens)]
            self.engine.add_request(request_id, token_ids, params)
        without_token = set(self.request_ids)
        for _ in range(MAX_STEPS + S):
            for output in self._outputs():
                if output.outputs[0].token_ids:
                    without_token.discard(output.request_id)
                    if output.request_id == self.request_ids[0]:  # starts first, so ends first
                        self.min_tokens_left -= 1
            if not without_token:
                return
        raise RuntimeError(f"measuring step times: {len(without_token)} of {S} requests get no token")

    def _outputs(self) -> list[RequestOutput]:
        """Run the engine's next step, and return its outputs. Raises RuntimeError if a request failed."""
        outputs = self.engine.step()
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(f"measuring step times: {output.error}")
        return outputs

    def stop(self) -> None:
        """Abort the requests, and land the step that is still in flight."""
        for request_id in self.request_ids:
            self.engine.abort_request(request_id)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        self.request_ids = []

    def set_num_drafts(self, k: int) -> None:
        """Have k drafts proposed for each request from now on."""
        self.speculation.lengths = DraftLengths(k, ALWAYS_DRAFT) if k else DraftLengths(1, NEVER_DRAFT)

    def step(self, total_drafts: int) -> float:
        """Run steps until a step with `total_drafts` drafts, of all sequences together, has landed. Returns
        the seconds between this landing and the one before. Raises RuntimeError if none of MAX_STEPS steps
        has as many drafts.
        """
        tally = self.speculation.tally
        last_landing = time.perf_counter()
        for _ in range(MAX_STEPS):
            proposed_before = tally.proposed
            if not self._outputs():  # a step was launched, but no step has landed
                continue
            landing = time.perf_counter()
            num_drafts = tally.proposed - proposed_before
            self.min_tokens_left -= 1 + num_drafts // len(self.request_ids)
            if num_drafts == total_drafts:
                return landing - last_landing
            last_landing = landing
        raise RuntimeError(f"measuring step times: no step has {total_drafts} drafts")


def _num_tokens(k: int) -> int:
    """The most tokens that a sequence gets while steps with k drafts are measured: k + 1 in each step.

    Besides the STEPS timed steps, there are one that is not timed, up to two that were scheduled or got their
    drafts before, and one to spare.
    """
    return (STEPS + 4) * (k + 1)
