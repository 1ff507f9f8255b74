"""The line of the log: what the engine did since the last one."""

from queue import Queue

from engine.decoding.params import SamplingParams
from engine.telemetry import stat_log
from engine.telemetry.stat_log import StatLog
from tests.part06.fakes import run_to_end

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
DEADLINE = 60  # seconds; it is waited for, and takes milliseconds


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_line_has_the_growth_since_the_last_one_by_the_seconds_between(measured):
    engine, metrics, _ = measured()
    clock, lines = Clock(), []
    log = StatLog(metrics, lines.append, clock)
    engine.add_request("a", "a prompt", GREEDY)  # a byte is a token
    run_to_end(engine)
    clock.now += 4
    line = log.line()
    assert line.startswith("Prompts 2.0 tokens/s, output 1.5 tokens/s, running 0, waiting 0, ")
    clock.now += 4
    assert log.line() is None, "an engine that did nothing and has nothing to do is no line"
    engine.add_request("b", "xy", GREEDY)
    run_to_end(engine)
    clock.now += 2
    assert log.line().startswith("Prompts 1.0 tokens/s, output 3.0 tokens/s, "), "growth, not the sum"


def test_who_only_waits_is_a_line(measured):
    engine, metrics, _ = measured()
    clock = Clock()
    log = StatLog(metrics, print, clock)
    engine.add_request("a", "a prompt", GREEDY)
    clock.now += 10
    assert "output 0.0 tokens/s, running 0, waiting 1, " in log.line()
    run_to_end(engine)


def test_it_writes_by_itself_until_it_is_closed(measured, monkeypatch):
    monkeypatch.setattr(stat_log, "INTERVAL", 0.001)
    engine, metrics, _ = measured()
    engine.add_request("a", "a prompt", GREEDY)
    lines: Queue[str] = Queue()
    log = StatLog(metrics, lines.put)
    thread = log.start()
    assert "waiting 1" in lines.get(timeout=DEADLINE)
    log.close()
    thread.join(DEADLINE)
    assert not thread.is_alive()
    log.close()
    run_to_end(engine)


def test_the_share_of_hits_is_that_of_the_tokens_looked_up_since_the_last_line(measured):
    _, metrics, _ = measured()
    clock = Clock()
    log = StatLog(metrics, print, clock)
    metrics.counters["ruvon:steps"] += 1
    metrics.counters["vllm:prefix_cache_queries"] += 40
    metrics.counters["vllm:prefix_cache_hits"] += 10
    clock.now += 1
    assert (log.line() or "").endswith("prefix cache 25.0% hits")


def test_who_runs_through_a_long_step_is_a_line_with_its_share_of_the_cache(measured):
    engine, metrics, _ = measured()
    engine.add_request("a", "seventeen letters", GREEDY)
    engine.step()
    clock = Clock()
    log = StatLog(metrics, print, clock)  # nothing has landed since this was made
    clock.now += 10
    assert "output 0.0 tokens/s, running 1, waiting 0, KV cache 3.1% in use, " in (log.line() or "no line"), (
        "two of 64 blocks"
    )
    run_to_end(engine)


def test_a_program_that_ends_does_not_wait_for_the_next_line(measured):
    _, metrics, _ = measured()
    log = StatLog(metrics, print)
    thread = log.start()
    log.close()
    thread.join(DEADLINE)
    assert thread.daemon


def test_without_a_look_up_nothing_was_hit_and_an_empty_cache_has_nothing_in_use(measured):
    _, metrics, _ = measured()
    clock = Clock()
    log = StatLog(metrics, print, clock)
    metrics.counters["ruvon:steps"] += 1
    clock.now += 1
    assert (log.line() or "").endswith("KV cache 0.0% in use, prefix cache 0.0% hits")
