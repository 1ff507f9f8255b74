"""What is read out of a trace, whole or cut off, and what is no trace."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from engine.client.trace_view import trace_view
from engine.telemetry.trace_events import DEVICE, ENGINE, LAND, REQUESTS, SCHEDULE
from engine.telemetry.trace_report import read_trace, trace_figures


def request(row: int, *slices: tuple, end: str | None = "length") -> list[dict]:
    """The events of a request. Each slice is (name, start, end, its arguments)."""
    place = {"pid": REQUESTS, "tid": row}
    events = [place | {"ph": "B", "ts": slices[0][1], "name": f"r{row}", "args": {}}]
    for name, start, stop, *details in slices:
        more = {"args": details[0]} if details else {}
        events.append(place | {"ph": "X", "ts": start, "dur": stop - start, "name": name} | more)
    if end:
        events.append(place | {"ph": "E", "ts": slices[-1][2], "args": {"reason": end}})
    return events


def step(number: int, times: tuple[int, int, int, int], tokens: int, sequences: int, **more) -> list[dict]:
    """The events of a step with the times of its start, its launch, its landing and its end."""
    of = {SCHEDULE: {}, DEVICE: {"tokens": tokens, "sequences": sequences} | more, LAND: {}}
    if "counted" in more:
        of[LAND]["counted"] = of[DEVICE].pop("counted")
    return [
        {"ph": "X", "pid": ENGINE, "tid": tid, "ts": start, "dur": end - start, "name": "step"}
        | {"args": of[tid] | {"step": number}}
        for tid, start, end in zip(of, times[:-1], times[1:], strict=True)
    ]


def write(path: Path, events: list[dict], end: str = "\n]\n") -> Path:
    path.write_text("[\n" + ",\n".join(map(json.dumps, events)) + end)
    return path


CHUNK = {"tokens": 8, "start": 0, "new": 0}
LAST = {"tokens": 8, "start": 8, "new": 1}
EVENTS = [
    *request(1, ("waiting", 0, 1000), ("prefill", 1000, 3000, CHUNK), ("prefill", 3000, 5000, LAST),
             ("decode", 6000, 7000), ("decode", 8000, 11000, {"tokens": 4, "new": 3})),
    *request(2, ("waiting", 0, 3000), ("prefill", 3000, 5000, LAST), ("preempted", 6000, 8000),
             ("prefill", 8000, 11000, LAST), end="stop"),
    *request(3, ("waiting", 9000, 10000), end="abort"),
    *step(1, (0, 1000, 3000, 3500), 8, 1, budget=16),
    *step(2, (3500, 4000, 5000, 6000), 16, 2, budget=16),
    *step(3, (6000, 6500, 7000, 7500), 1, 1, budget=16, counted={"draft_tokens": 3.0}),
    *step(4, (8000, 8500, 11000, 12000), 12, 2, budget=16, error="no", counted={"draft_tokens": 2.0}),
    {"ph": "i", "pid": ENGINE, "tid": SCHEDULE, "ts": 12000, "name": "end", "args": {"reason": "enough"}},
]  # fmt: skip


@pytest.fixture
def whole(tmp_path) -> Path:
    return write(tmp_path / "trace.json", EVENTS)


def test_the_figures_of_a_small_trace_by_hand(whole):
    found = trace_figures(read_trace(whole))
    assert found["requests"] == 3
    assert found["ended"] == {"abort": 1, "length": 1, "stop": 1}
    assert found["output_tokens"] == (1 + 1 + 3) + (1 + 1)
    assert found["time_to_first_token"] == {"p50": 5.0, "p95": 5.0, "count": 2}, "from arrivals, in ms"
    assert found["time_between_tokens"] == {"p50": 4.0, "p95": 6.0, "count": 3}, (
        "from the end of a slice with tokens to the end of the next, however many came, preempted or not"
    )
    assert found["queue_wait"] == {"p50": 1.0, "p95": 3.0, "count": 2}, "the third was in no step"
    assert found["preemptions"] == 1
    assert found["counted"] == {"draft_tokens": 5}
    assert (found["seconds"], found["end"]) == (0.012, "enough")


def test_the_times_of_steps_are_shared_and_their_fill_is_against_the_budget(whole):
    found = trace_figures(read_trace(whole))["step"]
    assert (found["p50"], found["p95"], found["count"], found["failed"]) == (2.5, 4.0, 4, 1)
    total = 3.5 + 2.5 + 1.5 + 4.0
    assert found["share_device"] == pytest.approx((2 + 1 + 0.5 + 2.5) / total)
    assert found["share_schedule"] == pytest.approx((1 + 0.5 + 0.5 + 0.5) / total)
    assert found["share_land"] == pytest.approx((0.5 + 1 + 0.5 + 1) / total)
    assert found["mean_tokens"] == (8 + 16 + 1 + 12) / 4
    assert found["mean_sequences"] == 6 / 4
    assert found["fill"] == pytest.approx((8 + 16 + 1 + 12) / 64)


def test_steps_that_overlap_have_no_moment_twice(tmp_path):
    """The second is scheduled while the device computes the first (Part 13)."""
    events = [*step(1, (0, 100, 1000, 1200), 1, 1), *step(2, (300, 1000, 2000, 2200), 1, 1)]
    found = trace_figures(read_trace(write(tmp_path / "trace.json", events)))["step"]
    assert (found["p50"], found["p95"]) == (1.0, 1.2), "the second from the first's end on"
    assert found["fill"] is None, "no budget, no share of it"


def test_a_step_that_lies_within_another_is_not_counted_twice(tmp_path):
    """As a stranger's file may have it. The third begins after both, in the first's time."""
    events = [
        *step(1, (0, 100, 9000, 10_000), 1, 1),
        *step(2, (1000, 1100, 1500, 2000), 1, 1),
        *step(3, (3000, 3100, 10_500, 11_000), 1, 1),
    ]
    found = trace_figures(read_trace(write(tmp_path / "trace.json", events)))["step"]
    assert (found["p50"], found["p95"]) == (1.0, 10.0), (
        "10 ms, nothing, and what the third has beyond the first"
    )
    assert found["share_land"] == pytest.approx((1.0 + 0.5 + 0.5) / 11.0)


def test_a_trace_that_was_cut_off_anywhere_is_read(whole, tmp_path):
    text = whole.read_text()
    begins = text.index("\n", text.index('"ts"')) + 1  # behind the first event with a time
    requests = set()
    cut = tmp_path / "cut.json"
    for length in range(begins, len(text), 5):
        cut.write_text(text[:length])
        found = trace_figures(read_trace(cut))
        requests.add(found["requests"])
        assert trace_view(found).renderables, "and it can be shown"
    assert requests == {1, 2, 3}, "what is there is counted"


def test_what_was_under_way_at_the_end_is_unfinished(tmp_path):
    events = request(1, ("waiting", 0, 10), end=None)
    found = trace_figures(read_trace(write(tmp_path / "cut.json", events, end="")))
    assert (found["requests"], found["ended"], found["end"]) == (1, {}, None)
    assert found["time_to_first_token"] is found["step"] is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "first line"),
        ("{}", "first line"),
        ("[1]", "first line"),
        ("\x00\xff", "first line"),
        ("[\n]\n", "no event with a time"),
        ("[\n1\n]\n", "line 2 is no event"),
        ("[\n{\n{}\n", "line 2 is no JSON"),
        ("[\n" + "[" * 50_000 + "\n]\n", "line 2 is no JSON"),
        ('[\n{"ph":"X"}\n]\n', "line 2 is no event"),
        ('[\n{"ph":"M"},\n{"ph":"E","tid":1,"ts":1,"args":{"reason":"x"}}\n]\n', "line 3 is no event"),
        ('[\n{"ph":"B","tid":[],"ts":1}\n]\n', "line 2: '\\[\\]' where a whole number"),
        ('[\n{"ph":"B","tid":1,"ts":-1}\n]\n', "'-1' where a whole number"),
        ('[\n{"ph":"B","tid":1,"ts":1e999}\n]\n', "'inf' where a whole number"),
        ('[\n{"ph":"B","tid":1,"ts":NaN}\n]\n', "'nan' where a whole number"),
        ('[\n{"ph":"B","tid":1,"ts":true}\n]\n', "'True' where a whole number"),
        ('[\n{"ph":"B","tid":1,"ts":1,"args":7}\n{"ph":1}\n', "line 3 is no event"),
        ('[\n{"ph":"M"},\n{"ph":"B","tid":1,"ts":1.5}\n]\n', "line 3: '1.5' where a whole number"),
        ("[\n" + " " * 100_000 + "{\n", "no event with a time"),
    ],
)
def test_what_is_no_trace_is_refused_in_one_line(text, says, tmp_path):
    path = tmp_path / "file"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(ValueError, match=says) as refusal:
        read_trace(path)
    assert "\n" not in str(refusal.value)


def test_no_file_and_a_folder_are_said(tmp_path):
    for path, says in ((tmp_path / "none", "No such file"), (tmp_path, "directory")):
        with pytest.raises(ValueError, match=says):
            read_trace(path)


def test_the_view_says_the_figures_and_commands_no_terminal(tmp_path, capsys):
    reason = "\x1b[2Jwiped"
    last = EVENTS[-1] | {"args": {"reason": reason}}
    events = [*EVENTS[:-1], last, *request(4, ("waiting", 0, 1), end=reason)]
    Console(width=100, highlight=False).print(
        trace_view(trace_figures(read_trace(write(tmp_path / "t", events))))
    )
    said = capsys.readouterr().out
    assert "\x1b" not in said
    words = ["4 requests", "7 output tokens", "time to first token", "5.00", "2 requests", "of the budget"]
    for shown in (*words, "preemptions: 1", "1 failed", "draft_tokens 5"):
        assert shown in said


def test_the_table_of_a_trace_is_as_wide_as_its_text(whole):
    table = trace_view(trace_figures(read_trace(whole))).renderables[2]
    console = Console(width=43, highlight=False)  # "time to first token  5.00  5.00  2 requests"
    with console.capture() as shown:
        console.print(table)
    assert [line.rstrip() for line in shown.get().splitlines()] == [
        "milliseconds          p50   p95  of",
        "time to first token  5.00  5.00  2 requests",
        "time between tokens  4.00  6.00  3 gaps",
        "wait in the queue    1.00  3.00  2 requests",
        "time of a step       2.50  4.00  4 steps",
    ], "five lines, two spaces between columns, none at the edges: so no cell is broken"
