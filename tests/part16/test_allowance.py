"""What speculation may cost, whatever a machine's costs are: a simulation of them, without clocks."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from types import SimpleNamespace

import pytest

from engine.batch import make_batch
from engine.executor import StepResult
from engine.scheduling.request import State
from engine.speculation.allowance import AGAIN, MOST, SHARE, Allowance
from engine.speculation.executor import SpeculativeExecutor
from engine.speculation.lengths import CHECK, PAUSE, Lengths, Seconds
from engine.speculation.verify import SKIPPED

DRAFTS = 5  # at most
WARM_UP = 1000  # plain steps: behind them, no more than LOSS is lost
LOSS = 0.05


def test_at_first_there_is_something_to_spend_and_what_is_saved_has_an_end():
    made = Allowance()
    assert made.is_open, "what is new has to be tried"
    for _ in range(10_000):
        made.spend(1, 1)
    assert made.left == MOST, "one good day does not pay for a bad year"


def test_who_has_spent_it_waits_until_enough_is_saved_again():
    made = Allowance()
    made.spend(MOST + 1, 1)
    assert made.left == pytest.approx(SHARE)
    assert made.is_open
    made.spend(2, 1)
    assert not made.is_open, "nothing is left"
    debt, steps = -made.left, 0
    while not made.is_open:
        made.spend(1, 1)
        steps += 1
    assert steps == pytest.approx((AGAIN + debt) / SHARE, abs=2), "tries come in a row, or none is finished"


def test_a_debt_has_an_end_too():
    made = Allowance()
    made.spend(1000, 1)
    assert made.left == -MOST, "a hiccup of the machine does not close it for ever"


@dataclass
class Costs:
    """Of a machine and its text."""

    step: Callable[[int], float]  # rows -> seconds of the target's pass
    draft: float = 0.1  # a pass of the proposer
    read: float = 0.002  # and each token that it reads
    stands: float = 0.8  # how often a draft stands, if those before it did


FREE_ROWS = Costs(lambda rows: 1.0)
ROWS = Costs(lambda rows: 0.5 + 0.5 * rows)
SOME = Costs(lambda rows: 1 + 0.05 * rows)
LAYOUTS = Costs(lambda rows: (1.0 if rows < 8 else 2.5) + 0.02 * rows)  # many rows take another form
SLOW_DRAFT = Costs(lambda rows: 1 + 0.01 * rows, draft=0.9)
SLOW_READING = Costs(lambda rows: 1 + 0.05 * rows, read=0.05)
WRONG_DRAFTS = Costs(lambda rows: 1 + 0.05 * rows, stands=0.1)
TWICE = Costs(lambda rows: 2 + 0.1 * rows, draft=0.2, read=0.004)  # SOME, on a machine half as fast
REGIMES = {
    "rows cost nothing": FREE_ROWS, "each row costs a step": ROWS, "rows cost something": SOME,
    "many rows take another form": LAYOUTS, "the draft model is slow": SLOW_DRAFT,
    "to catch up is dear": SLOW_READING, "drafts hardly ever stand": WRONG_DRAFTS, "half as fast": TWICE,
}  # fmt: skip


class Machine:
    """An executor's inner one, its proposer, its cache and its clock."""

    max_positions = 10**9

    def __init__(self, people: int, seed: int = 0, each: int = 80) -> None:
        self.now, self.people, self.costs, self.each = 0.0, people, SOME, each
        self._random, self._made = Random(seed), 0
        self.lengths = Lengths(DRAFTS)
        self.executor = SpeculativeExecutor(self, self, self, self.lengths, lambda: self.now)
        self.requests, self.read = [], {}

    def reserve(self, request, total) -> bool:
        return True

    def trim(self, request, total) -> None:
        pass

    def unread(self, request, ids) -> int:
        return max(1, len(ids) - self.read.get(request.id, 0))

    def propose(self, texts, most):
        self.now += self.costs.read * sum(self.unread(*text) for text in texts)
        self.now += self.costs.draft * max(most)
        for request, ids in texts:
            self.read[request.id] = len(ids)
        return [[7] * k for k in most]

    def submit(self, batch):
        self.now += self.costs.step(batch.num_tokens)
        self._batch = batch
        return self

    def result(self) -> StepResult:
        tokens = []
        for request in self._batch.requests:
            own = [7 if self._random.random() < self.costs.stands else 8 for _ in request.draft_ids]
            stood = [*own, 8].index(8)
            tokens.append([7] * stood + [8] + [SKIPPED] * (len(own) - stood))
        return StepResult(tokens)

    def plain_steps(self, count: float) -> float:
        """Work until requests got as many tokens as in so many plain steps; the share of time lost to plain
        steps, negative if it was gained.
        """
        start, worth = self.now, 0.0
        while worth < count:
            while len(self.requests) < self.people:
                self._made += 1
                self.requests.append(self._request(str(self._made)))
            batch = make_batch([(one, 1 + len(one.draft_ids)) for one in self.requests])
            result = self.executor.submit(batch).result()
            for one, own, drafts in zip(self.requests, result.tokens, result.drafts, strict=True):
                one.token_ids += own
                one.output.token_ids += own
                one.draft_ids, one.num_computed_tokens = drafts, len(one.token_ids) - 1
            worth += sum(map(len, result.tokens)) / len(self.requests)
            for one in self.requests:
                if len(one.output.token_ids) >= one.output.limit:
                    self.lengths.on_finish(one)
            self.requests = [one for one in self.requests if len(one.output.token_ids) < one.output.limit]
        return (self.now - start) / (worth * self.costs.step(self.people)) - 1

    def _request(self, name: str):
        limit = self._random.randint(self.each // 2, 3 * self.each // 2)
        return SimpleNamespace(
            id=name, token_ids=[7] * 20, draft_ids=[], num_prompt_tokens=20, num_computed_tokens=19,
            wants_every_row=False, output=SimpleNamespace(limit=limit, token_ids=[]),
            sampling=SimpleNamespace(stop_ids=(), is_adjusted=False), state=State.RUNNING, num_expected=0,
        )  # fmt: skip


@pytest.mark.parametrize("regime", REGIMES)
def test_in_no_regime_is_more_lost(regime):
    made = Machine(4)
    made.costs = REGIMES[regime]
    made.plain_steps(WARM_UP)
    lost = made.plain_steps(WARM_UP)
    assert lost < LOSS, f"{lost:.3f} of the time of plain steps is lost"


@pytest.mark.parametrize("people", [1, 8])
def test_nor_where_regimes_change(people):
    made, names = Machine(people), ["rows cost something", "each row costs a step", "the draft model is slow"]
    for name in ["rows cost something", *2 * names[1:], "half as fast", "drafts hardly ever stand"]:
        made.costs = REGIMES[name]
        lost = made.plain_steps(WARM_UP)
        assert lost < LOSS, f"{lost:.3f} is lost in the steps after a change to: {name}"


@pytest.mark.parametrize("people", [1, 4])
def test_what_pays_is_done(people):
    """Beside the best fixed length."""
    made = Machine(people)
    made.plain_steps(WARM_UP)
    gain = 1 / (1 + made.plain_steps(WARM_UP))
    best = max(
        sum(SOME.stands**j for j in range(k + 1)) * SOME.step(people)
        / (SOME.step(people * (k + 1)) + k * SOME.draft + SOME.read * people * (k + 1))
        for k in range(1, DRAFTS + 1)
    )  # fmt: skip
    assert gain > 0.9 * best, f"it makes {gain:.2f} of plain steps' speed; a fixed length {best:.2f}"


def test_after_a_choice_of_none_it_is_asked_less_and_less():
    made, asked = Lengths(DRAFTS), []
    for step in range(100):
        if made.asks(4):
            asked.append(step)
            made.chose(False)
    gaps = [b - a for a, b in pairwise(asked)]
    assert gaps[:6] == [2, 3, 5, 9, PAUSE + 1, PAUSE + 1], "twice as many steps each time, up to PAUSE"
    made.chose(False)
    assert not made.asks(4)
    assert made.asks(8), "another crowd, another answer"
    made.chose(True)
    assert made.asks(8), "what pays is asked for in each step"


def test_now_and_then_a_step_goes_without_drafts():
    made = Lengths(DRAFTS)
    for _ in range(CHECK):
        assert made.asks(1)
        made.stepped(1, 3, 1.0)
    assert not made.asks(1), "else nobody knows what a plain step costs by now"
    made.stepped(1, 1, 1.0)
    assert made.asks(1)


def test_a_step_is_charged_beside_a_plain_one():
    made = Lengths(DRAFTS)
    made.account(2, 6, 2, 9.0, 9.0)
    assert made.allowance.left == MOST, "nothing is known yet: nothing to compare with"
    made.stepped(2, 2, 2.0)
    made.account(2, 2, 2, 7.0, 0.0)
    assert made.allowance.left == MOST, "a plain step is one, however long it took"
    made.allowance.left = 5.0
    made.account(2, 2, 2, 1.0, 0.0)
    assert made.allowance.left == pytest.approx(5 + SHARE), "however short, too"
    made.account(2, 2, 2, 2.0, 1.0)
    assert made.allowance.left == pytest.approx(5 + 2 * SHARE - 0.5), "to propose takes time"
    made.stepped(2, 6, 5.0)
    before = made.allowance.left
    made.account(2, 6, 4, 9.0, 0.0)
    assert made.allowance.left == pytest.approx(before + 2 * (1 + SHARE) - 2.5), "as long as its like took"
    before = made.allowance.left
    made.account(2, 6, 4, 4.0, 0.0)
    assert made.allowance.left == pytest.approx(before + 2 * (1 + SHARE) - 2), "or as long as it took itself"


def test_who_takes_longer_again_and_again_is_believed():
    made = Seconds()
    for seconds in (1.0, 20.0, 1.0, 20.0):
        made.add(4, seconds)
    assert made.seen(4) < 1.2, "moments of somebody else"
    for _ in range(7):
        made.add(4, 20.0)
    assert made.seen(4) == 20.0
