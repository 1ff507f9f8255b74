"""Costs add up to the bill, whatever happens: hypothesis plays schedules, with a stopwatch beside them."""

import random
from fractions import Fraction
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.core.llm_engine import LLMEngine
from engine.decoding.params import SamplingParams
from engine.execution.runner import ModelRunner
from engine.scheduling.continuous import ContinuousScheduler
from engine.telemetry.bill import PAID_KINDS, Price
from engine.telemetry.cost import CostMeter
from engine.telemetry.shares import Weights
from tests.part06.fakes import CONFIG, TOKENIZER, BlockCache, FakeForward
from tests.part13.aheads import ahead, forward_of
from tests.part19.metering import Asked, Loud, Played

SEEDS = st.integers(0, 2**32 - 1)
QUICK = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Ticking:
    """A clock that goes on by a random number of nanoseconds whenever somebody looks."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.ns = rng, 0

    def perf_counter(self) -> float:
        self.ns += self.rng.choice([1, 7, 1000, 123_457, 10**7])
        return self.ns / 1e9


@QUICK
@given(seed=SEEDS)
def test_overlapping_steps_and_gaps_of_any_length(seed):
    """Steps by hand: each begins anywhere since the start of the last and ends after it, or not even that."""
    rng = random.Random(seed)
    played = Played(Weights(rng.randint(1, 99), rng.randint(1, 99), rng.randint(0, 9)))
    there: list[Asked] = []
    all_of_them: list[Asked] = []
    at = last_start = 0
    for number in range(rng.randint(1, 60)):
        what = rng.random()
        at += rng.choice([0, 1, 3, 1000, 10**9])  # nanoseconds
        if what < 0.3 or not there:
            there.append(Asked(str(number), rng.randint(1, 50)))
            all_of_them.append(there[-1])
            played.arrive(at / 1e9, there[-1])
        elif what < 0.5:
            played.finish(at / 1e9, there.pop(rng.randrange(len(there))), rng.choice(["stop", "abort"]))
        else:
            start = last_start = rng.randint(last_start, at)
            now = rng.sample(all_of_them, rng.randint(1, len(all_of_them)))  # some may have left
            work = {request: rng.randint(1, 9) for request in now}
            played.step(start / 1e9, at / 1e9, work, rng.choice([None, None, None, "it failed"]))
        if rng.random() < 0.2:
            played.seconds(at / 1e9)  # a look, which also checks the sum
    bill_adds_up(played.meter, at, [request.stats.account for request in all_of_them], played)


def bill_adds_up(meter: CostMeter, elapsed: int, accounts: list, played: Played | None = None) -> None:
    if played:
        played.clock.now = elapsed / 1e9
    bill = meter.read()
    assert bill.total_ns == elapsed, "requests, idle time and the rest are the time that has passed"
    assert bill.total == bill.price.per_hour * Fraction(elapsed, 3600 * 10**9), "and so is the money"
    paid = sum(account.total_ns for account in accounts)
    unpaid = sum(ns for kind, ns in bill.ns.items() if kind not in PAID_KINDS)
    assert paid + unpaid == elapsed, "what is on the accounts and what no request pays for: the bill"
    assert min(bill.ns.values()) >= 0
    assert sum(bill.cents().values()) == round_half_up(bill.total * 100), "also in whole cents"


def round_half_up(cents: Fraction) -> int:
    return (2 * cents.numerator + cents.denominator) // (2 * cents.denominator)


@pytest.mark.parametrize("kind", ["one step at a time", "one step ahead"])
@QUICK
@given(seed=SEEDS)
def test_an_engine_with_joins_aborts_preemptions_failures_and_pauses(kind, seed, monkeypatch):
    rng = random.Random(seed)
    clock = Ticking(rng)
    monkeypatch.setattr("engine.core.llm_engine.time", SimpleNamespace(perf_counter=clock.perf_counter))
    cache = BlockCache(rng.choice([9, 30]), 8)
    options = {"listeners": Loud(), "max_model_len": 64}
    if kind == "one step ahead":
        engine = ahead(cache, **options)
        forward = forward_of(engine).fake
    else:
        forward = FakeForward(cache)
        scheduler = ContinuousScheduler(cache, 5, 24)
        engine = LLMEngine(TOKENIZER, CONFIG, scheduler, ModelRunner([forward]), **options)
    forward.fail_at = {rng.randint(1, 40): RuntimeError("broken") for _ in range(rng.randint(0, 3))}
    weights = Weights(rng.randint(1, 10**6), rng.randint(1, 10**6), rng.randint(0, 1000))
    meter = CostMeter(Price(Fraction(rng.randint(1, 10**6), 1000)), weights, clock=clock.perf_counter)
    engine.listeners.add(meter)
    complete = []
    meter.closed.append(complete.append)
    names: list[str] = []
    for _ in range(rng.randint(5, 50)):
        what = rng.random()
        if what < 0.35:
            names.append(str(len(names)))
            params = SamplingParams(
                temperature=0, max_tokens=rng.randint(1, 20), n=1, ignore_eos=rng.random() < 0.5
            )
            engine.add_request(names[-1], "prompts are long or short "[: rng.randint(1, 26)], params)
        elif what < 0.42 and names:
            engine.abort_request(rng.choice(names))
        elif what < 0.5:
            clock.ns += rng.choice([1, 10**9])  # nobody does anything
        elif what < 0.6:
            meter.read()
        elif engine.has_unfinished_requests():
            engine.step()
    seen = meter.read()
    accounts = complete + meter.unfinished()
    elapsed = clock.ns - meter.started
    assert seen.total_ns == elapsed, "requests, idle time and the rest are the time that has passed"
    paid = sum(account.total_ns for account in accounts)
    assert paid == sum(seen.ns[kind] for kind in PAID_KINDS), "the accounts hold what requests paid"
    for kind in PAID_KINDS:
        assert sum(account.tokens[kind] for account in accounts) == seen.tokens[kind]
    assert len(accounts) == len(names), "an account for each request, complete or not"
