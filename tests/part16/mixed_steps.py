"""What tests of speculation and steps ahead by turns share: the fake model, guesses, and forced policies."""

from collections import defaultdict
from collections.abc import Callable
from copy import copy, deepcopy

import pytest

from engine.core.ahead import AheadEngine
from engine.decoding.logprobs import SUPPORTS
from engine.execution.last_tokens import LastTokens
from engine.execution.runner import Logits, ModelRunner
from engine.requests.batch import PLACEHOLDER
from engine.requests.listeners import Listener
from engine.scheduling.continuous import ContinuousScheduler
from engine.scheduling.scored_rows import scored_rows
from engine.speculation.capability import NgramProposer, Speculation
from engine.speculation.draft_model import DraftModel, DraftSampler
from engine.speculation.lengths import DraftLengths
from engine.speculation.measuring import ALWAYS_DRAFT
from engine.speculation.rejection_sampler import DraftProbs, RejectionSampler
from tests.part06.fakes import CONFIG, TOKENIZER, BlockCache, fake_logits
from tests.part12.pages import WatchedCache
from tests.part13.aheads import CPU, FakeAhead, fake_runner

DRAFTS = 3
WRONG = 4  # every fourth guess or so


class Policy(DraftLengths, Listener):
    """As many as may be behind the steps that it is told of, whatever they cost; it hears of each step."""

    def __init__(self, answer: Callable[[int], bool], most: int = DRAFTS) -> None:
        super().__init__(most, ALWAYS_DRAFT)
        self.answer, self.step = answer, 1

    def choose(self, request_ids, caps):
        return [min(self.max_drafts, cap) if self.answer(self.step) else 0 for cap in caps]

    def on_step(self, record):
        self.step += 1


POLICIES = {  # whether to propose behind the n-th step
    "always": lambda step: True,
    "never": lambda step: False,
    "by turns": lambda step: step % 2 == 0,
    "now and then": lambda step: step * 7 % 11 < 5,
}


def guesses(ids: list[int], most: int) -> list[int]:
    """What the fake model says next, but sometimes something else."""
    ids, made = list(ids), []
    for _ in range(most):
        token_id = int(fake_logits(ids).argmax())
        made.append(token_id if len(ids) % WRONG else (token_id + 1) % 200)
        ids.append(made[-1])
    return made


class Guessing(FakeAhead):
    """A draft model that is sometimes wrong, and looks as closely as the fake one at what it is given."""

    def __call__(self, batch):
        values = super().__call__(batch).values.clone()
        for i, row in enumerate(batch.rows.chosen):
            if not (batch.positions[row] + 1) % WRONG:
                values[i] = values[i].roll(1)
        return Logits(values)


class Telling(RejectionSampler):
    """An exercise that is open ends the test: an engine takes any error for its requests' own."""

    def __call__(self, logits, batch):
        try:
            return super().__call__(logits, batch)
        except NotImplementedError as error:
            pytest.fail(f"NotImplementedError: {error}")


def beside(cache: BlockCache | WatchedCache) -> BlockCache | WatchedCache:
    """The same plan, and another memory: a draft model's."""
    other = copy(cache)
    if isinstance(other, WatchedCache):
        other.memory = deepcopy(cache.memory)
    else:
        other.tokens = defaultdict(list)
    return other


def mixing(
    cache, policy: DraftLengths, how: str = "lookup", seats: int = 5, budget: int = 24,
    runner_class: type = ModelRunner, engine_class: type = AheadEngine, **options,
) -> AheadEngine:  # fmt: skip
    """`how`: "lookup" guesses from each text alone, "model" has a memory beside the target's."""
    runner, draft_probs = fake_runner(cache, seats, runner_class), DraftProbs()
    runner.select = Telling(draft_probs)
    proposer = NgramProposer(guesses)
    if how == "model":
        other, last = beside(cache), LastTokens(seats, CPU)
        reader = ModelRunner([Guessing(other, last)], select=DraftSampler(draft_probs), last_tokens=last)
        proposer = DraftModel(reader, cache, CONFIG.max_positions)
        if isinstance(other, WatchedCache):
            runner.before.append(lambda batch: other.memory.apply(batch.copies))
    scheduler = ContinuousScheduler(cache, seats, budget, select_rows=scored_rows)
    capabilities = [Speculation(proposer, scheduler, policy)]
    engine = engine_class(
        TOKENIZER, CONFIG, scheduler, runner, supports=SUPPORTS, capabilities=capabilities, **options
    )
    if isinstance(policy, Policy):
        engine.listeners.add(policy)
    return engine


def speculation_of(engine: AheadEngine) -> Speculation:
    (capability,) = engine.capabilities
    return capability


def kinds_of(engine: AheadEngine) -> list[str]:
    """Of each step from now on: whether it has drafts, is ahead of the one before, or is neither."""
    kinds, submit = [], engine.executor.submit

    def submitting(batch):
        ahead = PLACEHOLDER in batch.token_ids
        kinds.append("drafts" if batch.has_drafts else "ahead" if ahead else "alone")
        return submit(batch)

    engine.executor.submit = submitting
    return kinds
