"""What a trace has of each request, each step and each counter."""

import json
import threading
import time
from dataclasses import replace
from functools import partial

import pytest

from engine.decoding.params import SamplingParams
from engine.scheduling.continuous import ContinuousScheduler
from engine.telemetry.trace import Trace, open_trace
from engine.telemetry.trace_events import DEVICE, SCHEDULE
from engine.telemetry.trace_file import TraceFile
from tests.part06.fakes import BlockCache, FakeForward, Recorder, run_to_end
from tests.part11.traces import counted, lives, names, num_output_tokens, read_cut_off, read_strictly, steps

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SEVERAL = partial(ContinuousScheduler, max_num_seqs=4, max_num_batched_tokens=16)
ONE = partial(ContinuousScheduler, max_num_seqs=1, max_num_batched_tokens=16)


@pytest.fixture
def traced(fake_engine, tmp_path):
    """traced(**options of fake_engine) -> (an LLMEngine over the fake model, its trace, which has a file)."""
    made = []

    def make(*args, max_bytes: int = 2**20, **options):
        engine = fake_engine(*args, **options)
        scheduler = engine.scheduler
        budget = (lambda: scheduler.max_num_batched_tokens) if args else None
        file = open_trace(tmp_path / "trace.json", max_bytes)
        made.append(Trace(file, scheduler.cache, scheduler.cache.block_tokens, budget))
        engine.listeners.add(made[-1])
        return engine, made[-1]

    yield make
    for trace in made:
        trace.close()


def closed(trace: Trace) -> list[dict]:
    trace.close()
    return read_strictly(trace.file.path)


def test_a_request_waits_reads_its_prompt_in_chunks_and_decodes(traced):
    engine, trace = traced(SEVERAL)
    engine.add_request("a", "x" * 20, GREEDY)
    run_to_end(engine)
    life = lives(closed(trace))["a/0"]
    assert names(life) == ["waiting", "prefill", "prefill", *["decode"] * 5]
    begin, waiting, first, second, decode, *_, end = life
    assert begin["args"] == {"prompt": 20, "max_tokens": 6}
    assert first["args"] == {"tokens": 16, "start": 0, "cached": 0, "new": 0}
    assert second["args"] == {"tokens": 4, "start": 16, "new": 1}, "the first token comes with the last chunk"
    assert "args" not in decode, "a token computed and a token brought: nothing need be said"
    assert end["args"] == {"reason": "length", "tokens": 6}
    assert waiting["ts"] == begin["ts"]
    assert waiting["ts"] + waiting["dur"] == first["ts"], "the first step ends the wait"


def test_a_slice_ends_when_its_token_was_known(traced):
    engine, trace = traced(SEVERAL)
    for name in "ab":
        engine.add_request(name, f"prompt {name}", GREEDY)
    requests = [engine._submissions[name].samples[0] for name in "ab"]
    run_to_end(engine)
    of = lives(closed(trace))
    for request in requests:
        begin, _, *slices, _ = of[request.id]
        known = [trace._micros(moment) for moment in request.stats.token_times]
        assert [event["ts"] + event["dur"] for event in slices] == pytest.approx(known, abs=1)
        assert begin["ts"] == pytest.approx(trace._micros(request.stats.arrival), abs=1)


def test_a_steps_three_slices_are_its_record(traced):
    recorder = Recorder()
    engine, trace = traced(SEVERAL)
    engine.listeners.add(recorder)
    for name in "abc":
        engine.add_request(name, "x" * 10, GREEDY)
    run_to_end(engine)
    of = steps(closed(trace))
    assert list(of) == [record.number for record in recorder.records]
    for record in recorder.records:
        tracks = of[record.number]
        seconds = record.schedule_seconds, record.execute_seconds
        assert tracks[SCHEDULE]["dur"] == pytest.approx(seconds[0] * 1e6, abs=2)
        assert tracks[DEVICE]["dur"] == pytest.approx(seconds[1] * 1e6, abs=2)
        assert sum(t["dur"] for t in tracks.values()) == pytest.approx(
            (record.end - record.start) * 1e6, abs=3
        )
        assert tracks[DEVICE]["args"] == {
            "step": record.number,
            "tokens": sum(record.tokens_computed),
            "sequences": len(record.request_ids),
            "budget": 16,
        }


def test_a_row_is_taken_again_by_whoever_arrived_after_its_last_request_had_left(traced):
    engine, trace = traced(SEVERAL)
    for name in ("a", "b", "later"):
        if name == "later":
            run_to_end(engine)
        engine.add_request(name, "prompt", GREEDY)
    run_to_end(engine)
    of = lives(closed(trace))
    assert [of[f"{name}/0"][0]["tid"] for name in ("a", "b", "later")] == [1, 2, 1]


def test_who_arrived_while_a_row_was_taken_gets_another_even_if_it_is_queued_later(traced):
    """The server makes a request in another thread, and the engine queues it after the step under way."""
    engine, trace = traced(SEVERAL)
    engine.add_request("a", "prompt", replace(GREEDY, max_tokens=1))
    early = engine.make_requests("early", "prompt", GREEDY)
    run_to_end(engine)
    engine.add("early", early, "prompt")
    run_to_end(engine)
    of = lives(closed(trace))
    assert of["early/0"][0]["ts"] < of["a/0"][-1]["ts"], "it came before the other had left"
    assert [of["a/0"][0]["tid"], of["early/0"][0]["tid"]] == [1, 2]


def test_n_samples_are_n_rows(traced):
    engine, trace = traced(SEVERAL)
    engine.add_request("a", "prompt", SamplingParams(n=3, seed=1, max_tokens=4, ignore_eos=True))
    run_to_end(engine)
    of = lives(closed(trace))
    assert {life[0]["tid"] for life in of.values()} == {1, 2, 3}
    assert [num_output_tokens(life) for life in of.values()] == [4, 4, 4]


def test_a_preempted_request_waits_again_and_its_tokens_are_counted_once(traced):
    cache, recorder = BlockCache(num_blocks=6, block_tokens=8), Recorder()
    scheduler = partial(ContinuousScheduler, max_num_seqs=4, max_num_batched_tokens=32)
    engine, trace = traced(scheduler, cache, max_model_len=48)
    engine.listeners.add(recorder)
    for name in "abc":
        engine.add_request(name, f"prompt {name}", replace(GREEDY, max_tokens=16))
    run_to_end(engine)
    events = closed(trace)
    of = lives(events)
    preempted = [about for event, about in recorder.heard if event == "preempt"]
    assert preempted, "this cache is too small for all three"
    for request_id, life in of.items():
        found = names(life)
        assert found.count("preempted") == preempted.count(request_id)
        assert num_output_tokens(life) == 16
        for at, name in enumerate(found):
            if name == "preempted":
                again = life[at + 2]  # behind it: the begin of the outer slice comes first
                assert again["name"] == "prefill", "all that was known is computed again"
                assert again["args"]["tokens"] >= 8, "prompt and output together"
                assert again["args"]["new"] == 1, "and the next token comes with it"


def test_who_leaves_has_an_end_waiting_or_running(traced):
    engine, trace = traced(ONE)
    engine.add_request("runs", "prompt", GREEDY)
    engine.add_request("waits", "prompt", GREEDY)
    engine.step(), engine.step()
    engine.abort_request("waits")
    engine.abort_request("runs")
    of = lives(closed(trace))
    assert names(of["runs/0"]) == ["waiting", "prefill", "decode"]
    assert names(of["waits/0"]) == ["waiting"]
    assert [of[name][-1]["args"]["reason"] for name in ("runs/0", "waits/0")] == ["abort", "abort"]


def test_a_failed_step_says_why_and_brings_no_token(traced):
    cache = BlockCache(64, 16)
    forward = FakeForward(cache)
    forward.fail_at[2] = RuntimeError('the "cable" came loose\n')
    engine, trace = traced(SEVERAL, cache, forward)
    engine.add_request("a", "one", GREEDY)
    run_to_end(engine)
    events = closed(trace)
    life = lives(events)["a/0"]
    assert names(life) == ["waiting", "prefill", "failed"]
    assert life[-1]["args"]["reason"] == "error"
    assert "came loose" in life[-1]["args"]["error"]
    assert "came loose" in steps(events)[2][DEVICE]["args"]["error"]
    assert num_output_tokens(life) == 1


def test_counters_say_what_runs_waits_and_is_in_use_and_rest_when_the_engine_does(traced):
    cache = BlockCache(num_blocks=10, block_tokens=4)
    engine, trace = traced(partial(SEVERAL, max_num_seqs=1), cache, max_model_len=40)
    for name in "ab":
        engine.add_request(name, "x" * 8, replace(GREEDY, max_tokens=2))
    run_to_end(engine)
    events = closed(trace)
    assert counted(events, "requests") == [
        {"running": 1, "waiting": 1}, {"running": 0, "waiting": 1}, {"running": 1, "waiting": 0},
        {"running": 0, "waiting": 0},
    ]  # fmt: skip
    blocks = counted(events, "blocks of the cache")
    assert {sum(values.values()) for values in blocks} == {10}
    assert blocks[0] == {"used": 2, "free": 8}
    assert blocks[-1] == {"used": 0, "free": 10}
    tokens = counted(events, "tokens of a step")
    assert tokens[0] == {"prefill": 8, "decode": 0, "unused": 8}
    assert tokens[1] == {"prefill": 0, "decode": 1, "unused": 15}
    assert tokens[-1] == {"prefill": 0, "decode": 0, "unused": 0}, "no step, no tokens"
    assert sum(values["prefill"] + values["decode"] for values in tokens) == 2 * (8 + 1)


def test_without_a_budget_nothing_is_said_of_one(traced):
    engine, trace = traced()
    engine.add_request("a", "prompt", GREEDY)
    run_to_end(engine)
    events = closed(trace)
    assert all("unused" not in values for values in counted(events, "tokens of a step"))
    assert all("budget" not in tracks[DEVICE]["args"] for tracks in steps(events).values())


def test_what_a_client_calls_its_request_breaks_no_line(traced):
    engine, trace = traced(SEVERAL)
    wild = 'a"b\n\\\u2028é' + "x" * 1000
    engine.add_request(wild, "prompt", GREEDY)
    run_to_end(engine)
    (name,) = lives(closed(trace))
    assert name == f"{wild}/0"[:200]
    assert all(line.isascii() for line in trace.file.path.read_text().splitlines())


def test_what_arrived_before_the_trace_is_left_out(fake_engine, tmp_path):
    engine = fake_engine(SEVERAL)
    engine.add_request("before", "prompt", GREEDY)
    engine.step()
    trace = Trace(open_trace(tmp_path / "trace.json"), engine.scheduler.cache)
    engine.listeners.add(trace)
    engine.add_request("after", "prompt", GREEDY)
    run_to_end(engine)
    assert list(lives(closed(trace))) == ["after/0"]


def test_at_its_size_bound_the_trace_ends_and_the_engine_goes_on(traced, caplog):
    engine, trace = traced(SEVERAL, max_bytes=3000)
    for name in "abc":
        engine.add_request(name, "prompt", replace(GREEDY, max_tokens=40))
    assert all(not output.error for output in run_to_end(engine).values())
    engine.add_request("later", "prompt", GREEDY)
    run_to_end(engine)
    events = closed(trace)
    size = trace.file.path.stat().st_size
    assert 3000 <= size < 4500, "the last step and the ends of the open rows come on top"
    assert events[-1]["name"] == "end"
    assert "size bound of 3,000 bytes" in events[-1]["args"]["reason"]
    assert "later/0" not in lives(events)
    assert caplog.text.count("ends here") == 1, "the log says it, once"


def test_a_step_never_waits_for_the_disk(traced, monkeypatch):
    """The disk answers nothing until all steps are done."""
    answers = threading.Event()
    write = TraceFile._write_all

    def wait_and_write(file, text):
        assert answers.wait(40)
        write(file, text)

    engine, trace = traced(SEVERAL)
    monkeypatch.setattr(TraceFile, "_write_all", wait_and_write)
    engine.add_request("a", "prompt", GREEDY)
    run_to_end(engine)
    answers.set()
    assert num_output_tokens(lives(closed(trace))["a/0"]) == 6, "and nothing is lost"


def test_a_disk_that_fails_ends_the_trace_with_a_line_in_the_log_and_nothing_else(
    traced, monkeypatch, caplog
):
    failed = threading.Event()

    def fail(file, text):
        failed.set()
        raise OSError(28, "No space left on device")

    engine, trace = traced(SEVERAL)
    monkeypatch.setattr(TraceFile, "_write_all", fail)
    engine.add_request("a", "prompt", GREEDY)
    assert failed.wait(40)
    trace.file._thread.join(40)
    assert run_to_end(engine)["a"].error is None
    trace.close()
    assert caplog.text.count("ends here: No space left on device") == 1
    assert trace.file._pieces == [], "nothing is collected for a file that takes nothing"


def test_what_a_killed_program_leaves_has_all_but_the_last_events(traced, tmp_path):
    engine, trace = traced(SEVERAL)
    engine.add_request("a", "prompt", replace(GREEDY, max_tokens=30))
    for _ in range(10):
        engine.step()
    deadline = time.monotonic() + 40
    while '"step": 10' not in (text := trace.file.path.read_text()) and '"step":10' not in text:
        assert time.monotonic() < deadline, "the file's thread writes by itself"
        time.sleep(0.01)
    left = tmp_path / "left.json"
    left.write_text(text[:-7])  # in the middle of an event
    assert len(names(lives(read_cut_off(left))["a/0"])) >= 10
    run_to_end(engine)


@pytest.mark.parametrize("where", ["", "no/such/folder/file", "file/below"])
def test_a_file_that_cannot_be_written_is_refused_in_words(where, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"trace='.*': \w+") as refusal:
        open_trace(tmp_path / where)
    assert "\n" not in str(refusal.value)


def test_the_first_moment_says_when_and_of_what(fake_engine, tmp_path):
    cache = fake_engine().scheduler.cache
    trace = Trace(open_trace(tmp_path / "trace.json"), cache, about={"model": "fake"})
    events = closed(trace)
    (begin,) = [event for event in events if event["name"] == "begin"]
    assert begin["args"]["model"] == "fake"
    assert begin["args"]["utc"].endswith("Z")
    assert events[-1]["args"] == {"reason": "the engine was shut down"}
    trace.close()
    assert json.loads(trace.file.path.read_text()) == events, "a second close changes nothing"


@pytest.mark.parametrize("preempted", [False, True])
def test_a_step_right_behind_what_was_known_decodes_however_many_tokens_it_computes(traced, preempted):
    recorder = Recorder()
    engine, trace = traced(SEVERAL)
    engine.listeners.add(recorder)
    engine.add_request("a", "x" * 8, GREEDY)
    engine.step()
    if preempted:
        trace.on_preempt(engine._submissions["a"].samples[0])
    (record,) = recorder.records
    known = 8 + preempted  # the prompt, and the output token that a preemption has computed again
    now = time.perf_counter()
    moment = replace(record, number=2, start=now, end=now, schedule_seconds=0.0, execute_seconds=0.0)
    trace.on_step(replace(moment, tokens_computed=(3,), tokens_held=(known + 3,)))  # a token and two drafts
    engine.abort_request("a")
    assert names(lives(closed(trace))["a/0"])[-1] == "decode", "its drafts come behind all that was known"
