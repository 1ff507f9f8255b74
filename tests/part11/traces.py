"""Reads a trace as strictly as can be, and says what lies in its rows."""

import json
from collections import defaultdict
from pathlib import Path

from engine.telemetry.trace_events import DEVICE, ENGINE, LAND, REQUESTS, SCHEDULE

# By kind of event, as in Chrome's Trace Event Format: the fields that must be there, and those that may.
FIELDS = {
    "M": ("pid tid name args", ""),
    "B": ("pid tid ts name", "args"),
    "E": ("pid tid ts", "args"),
    "X": ("pid tid ts dur name", "args"),
    "C": ("pid ts name args", ""),
    "i": ("pid tid ts name s", "args"),
}
METADATA = {"process_name": "name", "thread_name": "name", "thread_sort_index": "sort_index"}


def read_strictly(path: Path) -> list[dict]:
    """The events of a trace that was closed, after `check`."""
    events = json.loads(path.read_text())
    check(events)
    return events


def read_cut_off(path: Path) -> list[dict]:
    """The whole events of a trace whose program was killed, after `check`."""
    text = path.read_text()
    assert not text.endswith("]\n"), "the program was killed before it closed the trace"
    head, _, last = text.rpartition(",\n")
    try:
        json.loads(last)
    except ValueError:
        text = head
    events = json.loads(text + "]")
    check(events, is_whole=False)
    return events


def check(events: list[dict], is_whole: bool = True) -> None:
    """Chrome's format, and more: on each track times never go back, outer slices begin and end in turns, and
    no slice reaches into the next one or out of its outer slice.
    """
    now = defaultdict(int)  # by track: the time that the next event may have at the earliest
    outer = set()  # tracks with an outer slice that has begun
    named = set()  # tracks that have a name
    for number, event in enumerate(events):
        where = f"event {number}: {event}"
        kind = event["ph"]
        needed, allowed = (set(fields.split()) for fields in FIELDS[kind])
        assert needed <= event.keys() - {"ph"} <= needed | allowed, where
        assert isinstance(event["name"] if kind != "E" else "", str), where
        if kind == "M":
            assert list(event["args"]) == [METADATA[event["name"]]], where
            named.add((event["pid"], event["tid"]))
            continue
        start, duration = event["ts"], event.get("dur", 0)
        assert type(start) is int, where
        assert type(duration) is int, where
        assert min(start, duration) >= 0, where
        track = (event["pid"], event["name"]) if kind == "C" else (event["pid"], event["tid"])
        assert start >= now[track], f"times of a track never go back, and slices do not overlap: {where}"
        now[track] = start + duration
        assert kind == "C" or track in named, f"a track has its name before its first event: {where}"
        assert event.get("s", "g") == "g", where
        if kind == "B":
            assert track not in outer, f"a row has one request at a time: {where}"
            outer.add(track)
        elif kind == "E":
            assert track in outer, f"what ends has begun: {where}"
            outer.remove(track)
        elif kind == "X" and event["pid"] == REQUESTS:
            assert track in outer, f"a request's slices lie in its outer slice: {where}"
        elif kind == "C":
            assert all(type(value) in (int, float) and value >= 0 for value in event["args"].values()), where
    assert not is_whole or not outer, "a trace that was closed has the end of each outer slice"


def lives(events: list[dict]) -> dict[str, list[dict]]:
    """The id of each request -> its events: its outer slice's begin, its slices, the outer slice's end."""
    in_row, of = {}, {}
    for event in events:
        if event["ph"] in "BXE" and event["pid"] == REQUESTS:
            if event["ph"] == "B":
                in_row[event["tid"]] = of[event["name"]] = []
            in_row[event["tid"]].append(event)
    return of


def names(life: list[dict]) -> list[str]:
    """The names of a request's slices, in order."""
    return [event["name"] for event in life if event["ph"] == "X"]


def num_output_tokens(life: list[dict]) -> int:
    """How many output tokens a request's slices have brought."""
    slices = [event for event in life if event["ph"] == "X"]
    counted = [event["args"]["new"] for event in slices if "new" in event.get("args", {})]
    return sum(counted) + sum(event["name"] == "decode" and "args" not in event for event in slices)


def steps(events: list[dict]) -> dict[int, dict[int, dict]]:
    """The number of each step -> its slices by track: SCHEDULE, DEVICE and LAND."""
    of = defaultdict(dict)
    for event in events:
        if event["ph"] == "X" and event["pid"] == ENGINE:
            of[event["args"]["step"]][event["tid"]] = event
    assert all(set(tracks) == {SCHEDULE, DEVICE, LAND} for tracks in of.values())
    return dict(of)


def counted(events: list[dict], name: str) -> list[dict]:
    """The values of a counter, in order."""
    return [event["args"] for event in events if event["ph"] == "C" and event["name"] == name]
