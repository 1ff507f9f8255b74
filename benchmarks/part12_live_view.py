"""What does an open page /engine cost: a step of 32 sequences, watched and not, and a copy of many blocks?

    python -m benchmarks.part12_live_view [--sequences 32] [--rounds 5]

`storyteller` over pages, all sequences decoding. One engine takes turns, with its view and without: processor
time of all threads. While it is watched, it makes as many frames as the server does for its watchers, and
encodes them in another thread, as the server does. Beside it each piece alone, and snapshots of plans of more
blocks than a model needs here.
"""

import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.part11_listening import MODEL, PROMPT, take_turns, workload
from benchmarks.record import middle, quartiles, record, show, whole_numbers
from engine.cache.memory import PageMemory
from engine.cache.paged import PagedCache
from engine.core.llm_engine import LLMEngine
from engine.decoding.params import SamplingParams
from engine.decoding.sampling import SamplingState
from engine.execution.runner import EagerWay, ModelRunner
from engine.layers.packed_linear import pack_linears
from engine.machine.collector import rare_collections
from engine.models.loader import load_model
from engine.requests.listeners import StepRecord
from engine.requests.request import Request
from engine.scheduling.continuous import ContinuousScheduler
from engine.server.live_routes import FRAMES_PER_SECOND, encode
from engine.telemetry.live_memory import copy_memory
from engine.telemetry.live_view import LiveView
from engine.text.tokenizer import Tokenizer

NUM_BLOCKS = 1024
MANY_BLOCKS = (1_000, 10_000, 100_000)
REPEATS = 50


class WatchedView(LiveView):
    """A view that makes frames by itself, behind a step, as often as the server asks for them."""

    def __init__(self, engine: LLMEngine, pool: ThreadPoolExecutor) -> None:
        super().__init__(engine, MODEL)
        self.pool, self.next_at = pool, 0.0
        self.noting: list[float] = []  # seconds of each `on_step`
        self.copying: list[float] = []  # seconds of each snapshot
        self.encoding: list[float] = []  # seconds of each frame in the other thread

    def on_step(self, step: StepRecord) -> None:
        start = time.perf_counter()
        super().on_step(step)
        self.noting.append(time.perf_counter() - start)
        if start >= self.next_at:
            self.next_at = start + 1 / FRAMES_PER_SECOND
            snapshot = self.snapshot()
            self.copying.append(snapshot.copy_seconds)
            encoded = self.pool.submit(encode, snapshot)
            encoded.add_done_callback(lambda done: self.encoding.append(done.result()[1]))


def seconds_of_plan(num_blocks: int) -> float:
    """The median seconds in the engine's thread for a copy of so many blocks, half of them in use."""
    cache = PagedCache(num_blocks)
    ids = list(range(num_blocks // 2 * cache.block_size))
    params = SamplingParams()
    sequence = Request(
        "a", "a", ids, len(ids), params, None, SamplingState(params, ids, [], 0)
    )  # it says nothing
    cache.admit(sequence)
    cache.reserve(sequence, len(ids))
    cache.commit(sequence, len(ids))
    sequence.num_computed_tokens = len(ids)
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        copy_memory(cache, [sequence])
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


@rare_collections()
def main() -> None:
    args = whole_numbers(__doc__.splitlines()[0], sequences=32, rounds=5)
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_pretrained(MODEL)
    model = load_model(MODEL, transform=partial(pack_linears, rows=args.sequences))
    alone, more = [], []  # ms of a step in each round, and by how much it is more when watched
    noting, copying, encoding = [], [], []
    with ThreadPoolExecutor(1) as pool:
        for _ in range(args.rounds):
            memory = PageMemory(model.config, NUM_BLOCKS)
            budget = args.sequences * len(PROMPT)
            scheduler = ContinuousScheduler(memory.plan(), args.sequences, budget)
            runner = ModelRunner([EagerWay(model, memory)], memory)
            engine = LLMEngine(tokenizer, model.config, scheduler, runner)
            view = WatchedView(engine, pool)
            with_, without = take_turns(engine, args.sequences)
            # A frame falls into one window of several, so means are compared, and not medians.
            alone.append(statistics.mean(without) * 1e3)
            more.append(statistics.mean(with_) * 1e3 - alone[-1])
            noting += view.noting
            copying += view.copying
            encoding += view.encoding
    step, difference = statistics.median(alone) / 1e3, statistics.median(more) / 1e3
    per_step = statistics.median(noting)
    per_frame = statistics.median(copying) + statistics.median(encoding)
    pieces = per_step / step + per_frame * FRAMES_PER_SECOND
    figures = {
        "step_ms": step * 1e3,
        "difference_share": difference / step,
        "noting_ms": per_step * 1e3,
        "copying_ms": statistics.median(copying) * 1e3,
        "encoding_ms": statistics.median(encoding) * 1e3,
        "pieces_share": pieces,
        "frames": len(copying),
        "rounds": {"step_ms": quartiles(alone), "difference_ms": quartiles(more)},
    }
    rows = [
        ["a step that nobody watches", middle(alone), None],
        ["the same, watched: more by", middle(more), f"{difference / step:.1%}"],
        ["to note a step", round(per_step * 1e3, 4), f"{per_step / step:.1%}"],
        ["to copy the engine's state for a frame", round(figures["copying_ms"], 4), None],
        ["to encode the frame, in another thread", round(figures["encoding_ms"], 4), None],
        ["all of these, by the second", None, f"{pieces:.1%}"],
    ]
    many = [[blocks, round(seconds_of_plan(blocks) * 1e3, 4)] for blocks in MANY_BLOCKS]
    tables = {
        "cost": {"columns": ["what", "ms", "share of a step"], "rows": rows},
        "blocks": {"columns": ["blocks", "ms of the engine's thread"], "rows": many},
    }
    about = workload(args.sequences, args.rounds)
    about |= {"blocks": NUM_BLOCKS, "frames_per_second": FRAMES_PER_SECOND}
    show(record("part12_live_view", __doc__.splitlines()[0], about, figures, tables), tables)


if __name__ == "__main__":
    main()
