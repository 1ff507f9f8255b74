"""Events of Chrome's trace format, each as one line of JSON. Part 11.

An event has a kind (`ph`), a process (`pid`), a track (`tid`) and a time (`ts`, in microseconds). Metadata
has no time, and a counter has no track. Promises lines without a line feed. Knows nothing of requests and
steps: trace.py says what happens when.

The events that come while the engine runs are put together as text, which takes less time than `json.dumps`
of a whole event. Each request has one of `begin_slice` and `end_slice`: only their name and values go through
`json.dumps`. Each step has several of `slice_event` and `counter`: these take their values as JSON text,
which their caller has formatted.
"""

import json
from collections.abc import Mapping

ENGINE, REQUESTS = 1, 2  # process ids
# Thread ids of the process ENGINE: the host schedules a step, the device computes it, and the host makes
# outputs of what has landed.
SCHEDULE, DEVICE, LAND = 1, 2, 3


def metadata(pid: int, tid: int, name: str, values: Mapping[str, object]) -> str:
    """Names or sorts a process or a track; `name` says which: "process_name", "thread_name" and others."""
    return json.dumps({"ph": "M", "pid": pid, "tid": tid, "name": name, "args": values})


def instant(name: str, ts: int, values: Mapping[str, object]) -> str:
    """An event without duration, for the whole trace."""
    place = {"pid": ENGINE, "tid": SCHEDULE, "ts": ts}
    return json.dumps({"ph": "i", "s": "g", **place, "name": name, "args": values})


def begin_slice(pid: int, tid: int, ts: int, name: str, values: Mapping[str, object]) -> str:
    """The beginning of an outer slice, which `end_slice` ends. Others may lie within it on the same track."""
    place = f'"pid":{pid},"tid":{tid},"ts":{ts}'
    return f'{{"ph":"B",{place},"name":{json.dumps(name)},"args":{json.dumps(values)}}}'


def end_slice(pid: int, tid: int, ts: int, values: Mapping[str, object]) -> str:
    """The end of the outer slice that is open on this track."""
    return f'{{"ph":"E","pid":{pid},"tid":{tid},"ts":{ts},"args":{json.dumps(values)}}}'


def slice_event(pid: int, tid: int, start: int, end: int, name: str, values_json: str = "") -> str:
    """A slice with its duration. `name` is written as it is, so it must need no escapes in JSON.
    `values_json` are its arguments as JSON, without the braces.
    """
    place = f'"pid":{pid},"tid":{tid},"ts":{start},"dur":{end - start}'
    arguments = f',"args":{{{values_json}}}' if values_json else ""
    return f'{{"ph":"X",{place},"name":"{name}"{arguments}}}'


def counter(name: str, ts: int, values_json: str) -> str:
    """The values of one of the engine's counters from `ts` on. `name` is written as it is, so it must need no
    escapes in JSON. `values_json` are the values as JSON, without the braces.
    """
    return f'{{"ph":"C","pid":{ENGINE},"ts":{ts},"name":"{name}","args":{{{values_json}}}}}'
