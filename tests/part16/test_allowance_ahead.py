"""What speculation may cost where plain steps run one ahead: the engine, on a device that is simulated."""

from dataclasses import replace
from random import Random

import pytest

from engine.decoding.params import SamplingParams
from engine.executor import Pending
from engine.speculation.ahead import RememberingExecutor
from engine.speculation.lengths import Lengths
from tests.part06.fakes import fake_logits
from tests.part16.mixed_steps import Blocks, kinds_of, mixing
from tests.part16.test_allowance import DRAFTS, LOSS, REGIMES, SOME, WARM_UP, Costs

HOST = 0.6  # what the host does for each step: beside the device, where that is at the step before


class Device:
    """A queue of steps, a host that works beside it, and their clock. A proposer keeps the host waiting."""

    def __init__(self, people: int, costs: Costs, host: float = HOST, penalties: bool = False) -> None:
        self.now = self.free = 0.0  # free: when the device has done all that it was given
        self.people, self.costs, self.host, self.random, self.made = people, costs, host, Random(0), 0
        self.lengths = Lengths(DRAFTS)
        self.penalties = {"presence_penalty": 0.01} if penalties else {}
        options = {"seats": people, "inner": self._inner(), "clock": lambda: self.now}
        self.engine = mixing(Blocks(400, 8), self.lengths, **options)
        self.kinds = kinds_of(self.engine)
        self.engine.executor.proposer.propose = self._propose

    def _propose(self, texts, most) -> list[list[int]]:
        self.now += self.costs.draft * max(most) + self.costs.read * len(texts)
        return [self._guess(ids, k) for (_, ids), k in zip(texts, most, strict=True)]

    def _guess(self, ids: list[int], most: int) -> list[int]:
        ids, made = list(ids), []
        for _ in range(most):
            token_id = int(fake_logits(ids).argmax())
            made.append(token_id if self.random.random() < self.costs.stands else (token_id + 1) % 200)
            ids.append(made[-1])
        return made

    def _inner(device) -> type:
        class Timed(Pending):
            def result(self):
                device.now = max(device.now, self.done)
                return super().result()

        class Inner(RememberingExecutor):
            def submit(self, batch):
                found = super().submit(batch)
                device.now += device.host
                device.free = max(device.now, device.free) + device.costs.step(batch.num_tokens)
                timed = Timed(found.batch, found.token_ids)
                object.__setattr__(timed, "done", device.free)
                return timed

        return Inner

    def lost(self, steps: float) -> float:
        """Work until requests got as many tokens as in so many plain steps, each on top of the last; the
        share of time lost to these, negative if it was gained.
        """
        start, worth, params = self.now, 0.0, SamplingParams(temperature=0, ignore_eos=True, **self.penalties)
        while worth < steps:
            while len(self.engine.unfinished_request_ids()) < self.people:
                self.made += 1
                one = replace(params, max_tokens=self.random.randint(60, 120))
                self.engine.add_request(str(self.made), [self.made % 250], one)
            before = {r.id: len(r.output.token_ids) for r in self.engine.scheduler.running}
            running = [*self.engine.scheduler.running, *self.engine.scheduler.waiting]
            for output in self.engine.step():
                assert not output.error, output.error
            worth += sum(len(r.output.token_ids) - before.get(r.id, 0) for r in running) / self.people
        step = self.costs.step(self.people)
        plain = step + self.host if self.penalties else max(step, self.host)
        return (self.now - start) / (worth * plain) - 1


@pytest.mark.parametrize("people", [1, 4])
@pytest.mark.parametrize("regime", REGIMES)
def test_in_no_regime_is_more_lost(regime, people):
    device = Device(people, REGIMES[regime])
    device.lost(WARM_UP)
    lost = device.lost(WARM_UP)
    assert lost < LOSS, f"{lost:.3f} of the time of plain steps ahead is lost"
    assert ("ahead" if lost > 0 else "drafts") == max(set(device.kinds), key=device.kinds.count)


@pytest.mark.parametrize(
    "regime", ["rows cost something", "each row costs a step", "drafts hardly ever stand"]
)
@pytest.mark.parametrize("options", [{"host": 2.5}, {"penalties": True}], ids=str)
def test_nor_where_the_host_is_slow_or_steps_cannot_run_ahead(regime, options):
    device = Device(2, REGIMES[regime], **options)
    device.lost(WARM_UP)
    lost = device.lost(WARM_UP)
    assert lost < LOSS, f"{lost:.3f} of the time of plain steps is lost"
    assert ("ahead" in device.kinds) == ("host" in options)


def test_nor_where_regimes_change():
    device = Device(4, SOME)
    for name in ["rows cost something", *2 * ["each row costs a step", "drafts hardly ever stand"]]:
        device.costs = REGIMES[name]
        lost = device.lost(WARM_UP)
        assert lost < LOSS, f"{lost:.3f} is lost in the steps after a change to: {name}"


@pytest.mark.parametrize("people", [1, 4])
def test_what_pays_beside_steps_ahead_is_done(people):
    """Beside the best fixed length, whose steps wait for the host."""
    device = Device(people, SOME)
    device.lost(WARM_UP)
    gain = 1 / (1 + device.lost(WARM_UP))
    best = max(
        sum(SOME.stands**j for j in range(k + 1)) * SOME.step(people)
        / (HOST + SOME.step(people * (k + 1)) + k * SOME.draft + SOME.read * people)
        for k in range(1, DRAFTS + 1)
    )  # fmt: skip
    assert best > 1.1
    assert gain > 0.9 * best, f"it makes {gain:.2f} of plain steps' speed; a fixed length {best:.2f}"


def test_where_drafts_gain_less_than_steps_ahead_do_nothing_is_proposed():
    """Drafts that pay beside a step which waits for the host, and not beside one ahead."""
    some = replace(SOME, draft=0.3, stands=0.5)
    waits = (1 + 0.5) / (HOST + some.step(2) + some.draft + some.read) * (HOST + some.step(1))
    assert waits > 1.05, "so it would pay"
    device = Device(1, some)
    device.lost(WARM_UP)
    before = len(device.kinds)
    assert device.lost(WARM_UP) < LOSS
    assert device.kinds[before:].count("drafts") < 0.1 * len(device.kinds[before:])
