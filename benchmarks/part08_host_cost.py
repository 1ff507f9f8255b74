"""What does the engine itself cost per step, beside the model: queues, batches, text, stop checks, delivery?

    python -m benchmarks.part08_host_cost [--sequences 256] [--steps 60]

Processor time of a step with all sequences decoding and no model (logits are handed out ready-made), once the
outputs have 100, 1,000 and 4,000 tokens: in synchronous use, and through AsyncLLMEngine with a reader each.
"""

import argparse
import asyncio
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.record import record
from engine.async_engine import AsyncLLMEngine
from engine.cache.manager import Usage
from engine.config import ModelConfig
from engine.decoding.params import SamplingParams
from engine.executor import Executor
from engine.llm_engine import LLMEngine
from engine.scheduling.continuous import ContinuousScheduler
from engine.tokenizer import Tokenizer

LENGTHS = (100, 1000, 4000)
PROMPT = [300] * 16
VOCAB = 512  # of the logits handed out: choosing among them costs little


class Room:
    """A cache that always has room and holds nothing."""

    def begin(self, seq):
        return 0

    def reserve(self, seq, total):
        return True

    def commit(self, seq, total):
        pass

    def release(self, seq):
        pass

    preempt = release

    def fits(self, total):
        return True

    def usage(self):
        return Usage(0, 0, 1)


def make_engine(sequences: int) -> LLMEngine:
    tokenizer = Tokenizer.from_pretrained("storyteller")
    config = ModelConfig(
        model_type="none", vocab_size=4096, hidden_size=1, num_layers=1, num_heads=1, num_kv_heads=1,
        head_dim=1, intermediate_size=1, max_positions=2 * max(LENGTHS), norm_eps=0.0, activation="none",
        tie_word_embeddings=True,
    )  # fmt: skip
    logits = torch.rand(sequences, VOCAB, generator=torch.Generator().manual_seed(0))
    logits[:, :300] = -1  # words, not bytes
    scheduler = ContinuousScheduler(Room(), sequences, sequences * len(PROMPT))
    return LLMEngine(tokenizer, config, scheduler, Executor(lambda batch: logits[: len(batch.requests)]))


def params(sequences: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max(LENGTHS) + 500, ignore_eos=True)


def sync_cost(sequences: int, steps: int) -> dict[int, float]:
    """output length -> ms of processor time per step."""
    engine = make_engine(sequences)
    for i in range(sequences):
        engine.add_request(str(i), PROMPT, params(sequences))
    return {length: _timed(engine, length, steps) for length in LENGTHS}


def _timed(engine: LLMEngine, length: int, steps: int) -> float:
    while len(engine.scheduler.running[0].output.token_ids if engine.scheduler.running else ()) < length:
        engine.step()
    took = []
    for _ in range(steps):
        start = time.process_time()
        engine.step()
        took.append(time.process_time() - start)
    return statistics.median(took) * 1e3


async def async_cost(sequences: int, steps: int) -> dict[int, float]:
    """The same through the engine's thread, with all readers in this loop: all processor time is counted."""
    engine = AsyncLLMEngine(make_engine(sequences), "none")
    costs: dict[int, float] = {}
    marks: dict[int, float] = {}

    async def read(i: int) -> None:
        stream = await engine.generate(PROMPT, params(sequences), str(i))
        async for output in stream:
            if i == 0:
                n = len(output.outputs[0].token_ids)
                for length in LENGTHS:
                    if n >= length and length not in marks:
                        marks[length] = (time.process_time(), n)
                    if n >= length + steps and length not in costs:
                        then, before = marks[length]
                        costs[length] = (time.process_time() - then) / (n - before) * 1e3
                if len(costs) == len(LENGTHS):
                    done.set()

    done = asyncio.Event()
    async with engine:
        readers = [asyncio.create_task(read(i)) for i in range(sequences)]
        await done.wait()
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    torch.set_num_threads(1)
    sync = sync_cost(args.sequences, args.steps)
    through = asyncio.run(async_cost(args.sequences, args.steps))
    rows = [[f"{length:,}", round(sync[length], 2), round(through[length], 2)] for length in LENGTHS]
    for row in rows:
        print(*row)
    record(
        "part08_host_cost",
        __doc__.splitlines()[0],
        {"sequences": args.sequences, "steps": args.steps, "lengths": list(LENGTHS)},
        {
            "sync_ms": {str(length): sync[length] for length in LENGTHS},
            "async_ms": {str(length): through[length] for length in LENGTHS},
        },
        {
            "cost": {
                "columns": [
                    "tokens in each output",
                    "in synchronous use, ms a step",
                    "through AsyncLLMEngine, ms a step",
                ],
                "rows": rows,
            }
        },
    )


if __name__ == "__main__":
    main()
