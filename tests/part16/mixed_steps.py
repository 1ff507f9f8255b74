"""What tests of speculation and steps ahead by turns share: the fake model, guesses, and forced policies."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from engine.ahead import LastTokens
from engine.cache.paged import PagedCache
from engine.decoding.logprobs import SUPPORTS
from engine.scheduling.continuous import ContinuousScheduler
from engine.scheduling.request import PLACEHOLDER
from engine.speculation.ahead import AheadSpeculativeEngine, AheadSpeculativeExecutor, RememberingExecutor
from engine.speculation.draft_model import DraftModel
from engine.speculation.executor import Lookup
from engine.speculation.lengths import Lengths
from engine.speculation.paired import PairedCache
from engine.speculation.verify import Verifier, has_drafts
from tests.part06.fakes import CONFIG, TOKENIZER, BlockCache, FakeForward, fake_logits
from tests.part13.aheads import CPU, FakeAhead

DRAFTS = 3
WRONG = 4  # every fourth guess or so


class Blocks(BlockCache):
    """Which takes back what was reserved for guesses."""

    def trim(self, seq, total: int) -> None:
        self.blocks[seq.id] = min(self.blocks[seq.id], -(-total // self.block_tokens))


class Policy(Lengths):
    """Asks when it is told to, and proposes as much as it may."""

    def __init__(self, answer: Callable[[int], bool], most: int = DRAFTS) -> None:
        super().__init__(most)
        self.answer, self.asked, self.told = answer, [], []

    def asks(self, people):
        self.asked.append(people)
        return self.answer(len(self.asked))

    def choose(self, request_ids, caps):
        return [min(self.most, cap) for cap in caps]

    def stepped(self, people, rows, seconds):
        self.told.append((people, rows, seconds, self.on_top))


POLICIES = {  # whether to ask behind the n-th step
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


class Guessing(FakeForward):
    """A draft model that is sometimes wrong, and looks as closely as the fake one at what it is given."""

    def __call__(self, batch):
        logits = super().__call__(batch)
        positions = [batch.positions[row] for rows in batch.logit_rows for row in rows]
        for row, position in enumerate(positions):
            if not (position + 1) % WRONG:
                logits[row] = logits[row].roll(1)
        return logits


class Telling(Verifier):
    """An exercise that is open ends the test: an engine takes any error for its requests' own."""

    def __call__(self, logits, batch):
        try:
            return super().__call__(logits, batch)
        except NotImplementedError as error:
            pytest.fail(f"NotImplementedError: {error}")


def mixing(
    cache, policy: Lengths, how: str = "lookup", seats: int = 5, budget: int = 24,
    inner: type = RememberingExecutor, clock: Callable[[], float] = lambda: 0.0, **options,
) -> AheadSpeculativeEngine:  # fmt: skip
    """`how`: "lookup" guesses from each text alone, "model" has a cache beside the target's."""
    target = cache
    if how == "model":
        size = cache.block_size if isinstance(cache, PagedCache) else cache.block_tokens
        cache = PairedCache(target, Blocks(cache.num_blocks, size))
        proposer = DraftModel(SimpleNamespace(config=CONFIG), cache, Guessing(cache.draft))
    else:
        proposer = Lookup(guesses)
    last = LastTokens(seats, CPU)
    verifier = Telling(getattr(proposer, "probs", {}))
    executor = AheadSpeculativeExecutor(
        inner(FakeAhead(target, last), TOKENIZER, last, sampler=verifier), cache, proposer, policy, clock
    )
    scheduler = ContinuousScheduler(cache, seats, budget)
    engine = AheadSpeculativeEngine(TOKENIZER, CONFIG, scheduler, executor, supports=SUPPORTS, **options)
    engine.listeners.add(policy)
    return engine


def kinds_of(engine: AheadSpeculativeEngine) -> list[str]:
    """Of each step from now on: whether it has drafts, is ahead of the one before, or is neither."""
    kinds, submit = [], engine.executor.submit

    def submitting(batch):
        kinds.append(
            "drafts" if has_drafts(batch) else "ahead" if PLACEHOLDER in batch.token_ids else "alone"
        )
        return submit(batch)

    engine.executor.submit = submitting
    return kinds
