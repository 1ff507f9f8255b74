"""What does a stream give to readers, and what does it cost the server?

    python -m benchmarks.part14_streaming [--repeats 5] [--tokens 128]      # a minute or two

A server in this process, whose event loop has a clock of its own (processor time of its thread), and 1, 8 or
32 readers in another. They all ask at once, for a stream or for an answer in one piece; the ways in turns.
"""

import multiprocessing
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from fastapi import FastAPI

from benchmarks.part14_readers import WORDS_PER_SECOND, Seen, at_once, crowd, question, streamed, wire_bytes
from benchmarks.record import record, show, whole_numbers
from engine.cache.slots import SlotMemory
from engine.client.stream import ChatClient
from engine.core.engine_thread import EngineThread
from engine.core.llm_engine import LLMEngine
from engine.decoding.chat_template import ChatTemplate
from engine.execution.runner import EagerWay, ModelRunner
from engine.layers.packed_linear import pack_linears
from engine.models.loader import load_model
from engine.requests.listeners import Listener, StepRecord
from engine.scheduling.continuous import ContinuousScheduler
from engine.server.app import create_app
from engine.server.chat import chat_routes
from engine.text.tokenizer import Tokenizer
from parts.stage import served

MODEL, USERS = "storyteller", (1, 8, 32)
STOP_ALLOWED, STOP_AFTER = 200, 20  # tokens, pieces
WAYS = {"stream": streamed, "one piece": at_once}


def build() -> tuple[EngineThread, FastAPI]:
    tokenizer = Tokenizer.from_pretrained(MODEL)
    model = load_model(MODEL, transform=partial(pack_linears, rows=max(USERS)))
    memory = SlotMemory(model.config, max(USERS), 256)
    scheduler = ContinuousScheduler(memory.plan(), max(USERS), 512)
    runner = ModelRunner([EagerWay(model, memory)], memory)
    engine = LLMEngine(tokenizer, model.config, scheduler, runner, max_model_len=256)
    template = ChatTemplate.from_pretrained(MODEL)
    backend = EngineThread(engine, MODEL)
    return backend, create_app(backend, [chat_routes(tokenizer, model.config, template)])


@contextmanager
def clocked(app: FastAPI) -> Iterator[tuple[str, dict[str, int]]]:
    """(address of a server, clocks of the processor time of its threads "engine" and "loop")"""
    others = set(threading.enumerate())
    with served(app) as address:
        new = [thread for thread in threading.enumerate() if thread not in others]
        (engine,) = [thread for thread in new if thread.name == "engine"]
        (loop,) = [thread for thread in new if thread.name != "engine"]
        threads = {"engine": engine, "loop": loop}
        yield address, {name: time.pthread_getcpuclockid(t.ident) for name, t in threads.items()}


class Computed(Listener):
    """How many tokens went through the model."""

    tokens = 0

    def on_step(self, record: StepRecord) -> None:
        self.tokens += sum(record.tokens_computed)


def stopped(address: str, engine: LLMEngine) -> dict[str, int]:
    """A reader who leaves: how long the answer might have become, and what was computed of it."""
    computed, client = Computed(), ChatClient(address)
    engine.listeners.add(computed)
    pieces = client.stream(question(0), max_completion_tokens=STOP_ALLOWED, ignore_eos=True, temperature=0)
    for _ in range(STOP_AFTER):
        next(pieces)
    pieces.close()
    while engine.has_unfinished_requests():
        time.sleep(0.01)
    client.close()
    return {"allowed": STOP_ALLOWED, "pieces_read": STOP_AFTER, "tokens_computed": computed.tokens}


def main() -> None:
    args = whole_numbers(__doc__.splitlines()[0], repeats=5, tokens=128)
    torch.set_num_threads(1)
    wishes = {"max_completion_tokens": args.tokens, "temperature": 0.8, "ignore_eos": True}
    found: dict[tuple[int, str], list[tuple[list[Seen], float]]] = {}
    spawn = multiprocessing.get_context("spawn")
    backend, app = build()
    engine = backend.engine
    with clocked(app) as (address, clocks), ProcessPoolExecutor(1, spawn) as readers:
        for way in WAYS.values():  # to warm up
            readers.submit(crowd, address, [way], wishes).result()
        stream_bytes = wire_bytes(address, 0, wishes)
        stop = stopped(address, engine)
        for _ in range(args.repeats):
            for users in USERS:
                for name, way in WAYS.items():
                    before = time.clock_gettime(clocks["loop"])
                    seen = readers.submit(crowd, address, [way] * users, wishes).result()
                    found.setdefault((users, name), []).append(
                        (seen, time.clock_gettime(clocks["loop"]) - before)
                    )
    figures: dict[str, Any] = {"bytes_per_token": {}, "users": {}, "stop": stop}
    for (users, name), rounds in found.items():
        everyone = [one for seen, _ in rounds for one in seen]
        last_words = [statistics.median(one.last_word for one in seen) * 1e3 for seen, _ in rounds]
        figures["users"].setdefault(str(users), {})[name] = {
            "first_word_ms": statistics.median(one.first_word for one in everyone) * 1e3,
            "last_word_ms": statistics.median(one.last_word for one in everyone) * 1e3,
            "last_word_ms_spread": [min(last_words), max(last_words)],
            "read_seconds": statistics.median(one.read for one in everyone),
            "words_per_second": statistics.median(len(one.words) / one.last_word for one in everyone),
            "loop_us_per_token": statistics.median(
                cpu / sum(one.num_tokens for one in seen) for seen, cpu in rounds
            )
            * 1e6,
        }
        if (users, name) == (1, "one piece"):
            (one,) = rounds[0][0]
            figures["bytes_per_token"] = {
                "stream": stream_bytes / one.num_tokens,
                "one_piece": one.bytes_read / one.num_tokens,
            }
        if users == max(USERS):
            middle_one = sorted(everyone, key=lambda one: one.last_word)[len(everyone) // 2]
            figures.setdefault("trace", {})[name] = [round(when, 4) for when in middle_one.words]
    by = figures["users"]
    gain = by[str(max(USERS))]
    figures["sooner"] = gain["one piece"]["first_word_ms"] / gain["stream"]["first_word_ms"]
    figures["reading_words_per_second"] = WORDS_PER_SECOND
    figures["times_reading_speed"] = gain["stream"]["words_per_second"] / WORDS_PER_SECOND
    figures["stream_adds_us_per_token"] = {
        users: both["stream"]["loop_us_per_token"] - both["one piece"]["loop_us_per_token"]
        for users, both in by.items()
    }
    tables = {
        "readers": {
            "columns": [
                "users at once", "way", "first word, ms", "last word, ms", "least", "most",
                "words per second", "all read after, s",
            ],
            "rows": [
                [int(users), name, round(one["first_word_ms"], 1), round(one["last_word_ms"], 1),
                 *(round(ms, 1) for ms in one["last_word_ms_spread"]),
                 round(one["words_per_second"], 1), round(one["read_seconds"], 2)]
                for users, both in by.items() for name, one in both.items()
            ],
        },
        "cost": {
            "columns": ["users at once", "streamed, µs per token", "in one piece, µs per token"],
            "rows": [
                [int(users), *(round(both[name]["loop_us_per_token"], 1) for name in WAYS)]
                for users, both in by.items()
            ],
        },
    }  # fmt: skip
    workload = {"model": MODEL, "users": USERS, "tokens": args.tokens, "repeats": args.repeats}
    path = record("part14_streaming", __doc__.splitlines()[0], workload, figures, tables)
    show(path, tables)


if __name__ == "__main__":
    main()
