"""What does the engine itself cost per step, beside the model: queues, batches, text, stop checks, delivery?

    python -m benchmarks.part08_host_cost [--sequences 256] [--windows 12]

Processor time of a step with all sequences decoding and no model (logits are handed out ready-made), once
the outputs have 100, 1,000 and 4,000 tokens: in synchronous use, and through EngineThread with a reader
each. A round is the mean of WINDOW steps; figures are medians of --windows rounds.
"""

import asyncio
import itertools
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.part06_queue import ReadyMade
from benchmarks.record import middle, quartiles, record, show, whole_numbers
from benchmarks.shapes import no_model
from engine.cache.manager import Locations, Usage
from engine.core.engine_thread import EngineThread
from engine.core.llm_engine import LLMEngine
from engine.decoding.params import SamplingParams
from engine.execution.runner import ModelRunner
from engine.machine.collector import rare_collections
from engine.scheduling.continuous import ContinuousScheduler
from engine.text.tokenizer import Tokenizer

LENGTHS = (100, 1000, 4000)
PROMPT = [300] * 16
WINDOW = 20  # steps
VOCAB = 512  # of the logits handed out: choosing among them costs little


class Room:
    """A cache that always has room and holds nothing."""

    def admit(self, seq):
        return 0

    def reserve(self, seq, num_tokens):
        return True

    def commit(self, seq, num_tokens):
        pass

    def release(self, seq):
        pass

    preempt = release

    def fits(self, num_tokens):
        return True

    def usage(self):
        return Usage(0, 0, 1)

    def locate(self, ids, query_start, positions):
        return Locations(np.zeros((len(ids), 1), dtype=np.int64), np.zeros(len(positions), dtype=np.int64))

    def take_copies(self):
        return ()


def make_engine(sequences: int) -> LLMEngine:
    tokenizer = Tokenizer.from_pretrained("storyteller")
    config = no_model(3 * max(LENGTHS))
    logits = torch.rand(sequences, VOCAB, generator=torch.Generator().manual_seed(0))
    logits[:, :300] = -1  # words, not bytes
    scheduler = ContinuousScheduler(Room(), sequences, sequences * len(PROMPT))
    return LLMEngine(tokenizer, config, scheduler, ModelRunner([ReadyMade(logits)]))


def params(windows: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max(LENGTHS) + (windows + 1) * WINDOW, ignore_eos=True)


def sync_cost(sequences: int, windows: int) -> dict[int, list[float]]:
    """output length -> ms of processor time per step, of each window."""
    engine = make_engine(sequences)
    for i in range(sequences):
        engine.add_request(str(i), PROMPT, params(windows))
    return {length: _timed(engine, length, windows) for length in LENGTHS}


def _timed(engine: LLMEngine, length: int, windows: int) -> list[float]:
    while len(engine.scheduler.running[0].output.token_ids if engine.scheduler.running else ()) < length:
        engine.step()
    took = []
    for _ in range(windows):
        start = time.process_time()
        for _ in range(WINDOW):
            engine.step()
        took.append((time.process_time() - start) / WINDOW * 1e3)
    return took


async def async_cost(sequences: int, windows: int) -> dict[int, list[float]]:
    """The same through the engine's thread, with all readers in this loop: all processor time is counted."""
    engine = EngineThread(make_engine(sequences), "none")
    seen: list[tuple[int, float]] = []  # tokens the first reader has, processor time

    async def read(i: int) -> None:
        async for output in await engine.generate(PROMPT, params(windows), str(i)):
            if i == 0:
                seen.append((len(output.outputs[0].token_ids), time.process_time()))

    async with engine:
        await asyncio.gather(*map(read, range(sequences)))
    return {length: _windows(seen, length, windows) for length in LENGTHS}


def _windows(seen: list[tuple[int, float]], length: int, windows: int) -> list[float]:
    """ms per step in the windows behind `length` tokens; readers may miss a step: windows differ."""
    marks = [next(pair for pair in seen if pair[0] >= length + i * WINDOW) for i in range(windows + 1)]
    return [(b[1] - a[1]) / (b[0] - a[0]) * 1e3 for a, b in itertools.pairwise(marks) if b[0] > a[0]]


@rare_collections()
def main() -> None:
    args = whole_numbers(__doc__.splitlines()[0], sequences=256, windows=12)
    torch.set_num_threads(1)
    sync = sync_cost(args.sequences, args.windows)
    through = asyncio.run(async_cost(args.sequences, args.windows))
    columns = [
        "tokens in each output", "in synchronous use, ms a step", "through EngineThread, ms a step",
    ]  # fmt: skip
    rows = [[f"{length:,}", middle(sync[length]), middle(through[length])] for length in LENGTHS]
    tables = {"cost": {"columns": columns, "rows": rows}}
    figures = {
        "sync_ms": {str(length): quartiles(ms) for length, ms in sync.items()},
        "async_ms": {str(length): quartiles(ms) for length, ms in through.items()},
    }
    workload = {
        "sequences": args.sequences, "windows": args.windows, "window": WINDOW, "lengths": list(LENGTHS),
    }  # fmt: skip
    show(record("part08_host_cost", __doc__.splitlines()[0], workload, figures, tables), tables)


if __name__ == "__main__":
    main()
