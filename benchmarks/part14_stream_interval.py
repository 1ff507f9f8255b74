"""Why is a stream's last word late, and what do events for several tokens bring?

    python -m benchmarks.part14_stream_interval [--rounds 5] [--users 32] [--tokens 128]   # minutes

A server in this process, whose two threads, the engine's and the event loop's, have clocks of their own
(processor time), and so many readers in another process, who all ask at once. The sides take turns in each
round. What the engine waits is the time of a step less its thread's processor time: there it wants to compute
and does not. Two sides look for the cause: readers that throw the bytes away, and a switch interval of the
interpreter's lock that is a tenth of Python's own.

The control is the time of a step while all answers come in one piece. It is taken before and after each
round, and a round in which it has changed by more than a tenth is taken again. It is the unit of the table: a
step of 1.5 is half as long again as one of answers in one piece, on the same machine in the same moments.
"""

import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import httpx
import torch

from benchmarks.part14_readers import Seen, at_once, crowd, question, streamed
from benchmarks.part14_streaming import MODEL, build, clocked
from benchmarks.record import middle, quartiles, record, show, whole_numbers
from benchmarks.steady import steady_rounds
from engine.requests.listeners import Listener, StepRecord

INTERVALS = (1, 2, 5, 10, 20)
SWITCH_SECONDS = 0.0005  # Python's own is 0.005
Way = Callable[..., Seen]


def drained(address: str, number: int, wishes: dict, watch: Callable[[Seen], None] | None = None) -> Seen:
    """Ask question `number` for a stream, and throw its bytes away: the first and the last have a time."""
    seen = Seen()
    with httpx.Client(base_url=address, timeout=300) as http:
        model = http.get("/v1/models").json()["data"][0]["id"]
        body = {"model": model, "messages": question(number), "seed": number, "stream": True} | wishes
        start = time.perf_counter()
        with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            for piece in answer.iter_raw():
                if not seen.words or b"[DONE]" in piece:
                    seen.words.append(time.perf_counter() - start)
    return seen


@dataclass(frozen=True)
class Side:
    """One way to serve and to read."""

    way: Way = streamed
    interval: int = 1  # tokens from one event to the next
    switch_seconds: float = 0.005


IN_ONE_PIECE = Side(at_once)
SIDES = {
    "in one piece": IN_ONE_PIECE,
    **{f"stream, tokens an event: {n}": Side(interval=n) for n in INTERVALS},
    "1, readers throw it away": Side(drained),
    "1, the lock changes hands sooner": Side(switch_seconds=SWITCH_SECONDS),
}

FIGURES = {  # as in the record, and in the table
    "last_word": "last word after, steps",
    "step": "a step",
    "engine": "the engine computes",
    "waits": "the engine waits",
    "loop": "the event loop works",
    "first_word": "first word after, steps",
}


class Steps(Listener):
    """How many steps the engine made, and from when to when."""

    number, start, end = 0, 0.0, 0.0

    def on_step(self, record: StepRecord) -> None:
        self.start = self.start if self.number else record.start
        self.number, self.end = self.number + 1, record.end


def main() -> None:
    args = whole_numbers(__doc__.splitlines()[0], rounds=5, users=32, tokens=128)
    torch.set_num_threads(1)
    wishes = {"max_completion_tokens": args.tokens, "temperature": 0.8, "ignore_eos": True}
    backend, app = build()
    steps = Steps()
    backend.engine.listeners.add(steps)
    spawn = multiprocessing.get_context("spawn")
    with clocked(app) as (address, clocks), ProcessPoolExecutor(1, spawn) as readers:

        def served(side: Side) -> dict[str, float]:
            """A crowd's answers: medians over its readers, and means over the engine's steps, in ms."""
            backend.stream_interval = side.interval
            sys.setswitchinterval(side.switch_seconds)
            before = {name: time.clock_gettime(clock) for name, clock in clocks.items()}
            steps.number = 0
            seen = readers.submit(crowd, address, [side.way] * args.users, wishes).result()
            used = {name: time.clock_gettime(clock) - before[name] for name, clock in clocks.items()}
            wall = steps.end - steps.start
            return {
                "first_word": statistics.median(one.first_word for one in seen) * 1e3,
                "last_word": statistics.median(one.last_word for one in seen) * 1e3,
                "step": wall / steps.number * 1e3,
                "engine": used["engine"] / steps.number * 1e3,
                "waits": (wall - used["engine"]) / steps.number * 1e3,
                "loop": used["loop"] / steps.number * 1e3,
            }

        def control() -> float:
            return served(IN_ONE_PIECE)["step"]

        control()  # warms up
        kept = steady_rounds(
            args.rounds, control, lambda *_: {name: served(side) for name, side in SIDES.items()}
        )
    sys.setswitchinterval(IN_ONE_PIECE.switch_seconds)
    in_steps = {
        name: {key: [found[name][key] / step for found, step in kept] for key in FIGURES} for name in SIDES
    }  # side -> figure -> of each round, in steps of the control
    tables = {
        "sides": {
            "columns": ["how", *FIGURES.values()],
            "rows": [
                [name, middle(of["last_word"]), *map(statistics.median, list(of.values())[1:])]
                for name, of in in_steps.items()
            ],
        }
    }
    workload = {
        "model": MODEL,
        "users": args.users,
        "tokens": args.tokens,
        "rounds": args.rounds,
        "torch_threads": 1,
    }
    figures = {
        "control_step_ms": quartiles([step for _, step in kept]),
        "in_steps": {name: {key: quartiles(of[key]) for key in of} for name, of in in_steps.items()},
        "intervals": INTERVALS,
    }
    path = record("part14_stream_interval", __doc__.splitlines()[0], workload, figures, tables)
    show(path, tables)


if __name__ == "__main__":
    main()
