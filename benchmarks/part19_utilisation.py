"""What does an output token cost on a server that waits, and on one that is full?

    python -m benchmarks.part19_utilisation [--rounds 5] [--seconds 3]      # two or three minutes

`storyteller` over pages with SEATS seats. First everything at once: the most that the server can do. Then, in
rounds, requests come at shares of that rate, for `seconds` each, and a meter keeps the bill until the time is
over and the last answer has ended. When they come is drawn anew each time, how many is not, so that rounds of
a share are alike. Figures are medians of the rounds. A price is supposed: PRICE dollars an hour.
"""

import asyncio
import random
import sys
import time
from contextlib import aclosing
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.record import quartiles, record, show, spread, whole_numbers
from engine.cache.memory import PageMemory
from engine.core.engine_thread import EngineThread
from engine.core.llm_engine import LLMEngine
from engine.decoding.params import SamplingParams
from engine.execution.runner import EagerWay, ModelRunner
from engine.layers.packed_linear import pack_linears
from engine.models.loader import load_model
from engine.scheduling.continuous import ContinuousScheduler
from engine.telemetry.bill import Bill, Price
from engine.telemetry.cost import CostMeter
from engine.text.tokenizer import Tokenizer
from engine.wiring.attention_kernel import attention_kernel

MODEL = "storyteller"
SEATS = 16
PRICE = "1.00"
SHARES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
ALL_AT_ONCE = 96  # requests
OUTPUT = (16, 96)  # tokens, at least and at most


class Server:
    """An engine in its thread; every run has a meter of its own."""

    def __init__(self) -> None:
        self.tokenizer = Tokenizer.from_pretrained(MODEL)
        self.model = load_model(MODEL, transform=partial(pack_linears, rows=SEATS))
        config, parameter = self.model.config, next(self.model.parameters())
        kernel = attention_kernel("sdpa", config.head_dim, parameter.device, parameter.dtype)
        memory = PageMemory(config, SEATS * 32, 16, kernel=kernel)
        scheduler = ContinuousScheduler(memory.plan(enable_prefix_caching=False), SEATS, 256)
        runner = ModelRunner([EagerWay(self.model, memory)], memory)
        self.engine = LLMEngine(self.tokenizer, config, scheduler, runner)
        self.backend = EngineThread(self.engine, MODEL)
        self._asked = 0

    async def ask(self, rng: random.Random) -> None:
        self._asked += 1
        prompt = [rng.randrange(1, 4000) for _ in range(rng.randint(8, 96))]
        params = SamplingParams(temperature=0, max_tokens=rng.randint(*OUTPUT), ignore_eos=True)
        async with aclosing(await self.backend.generate(prompt, params, str(self._asked))) as outputs:
            async for _ in outputs:
                pass

    async def at_once(self) -> float:
        """Requests per second when all are there from the start."""
        start = time.perf_counter()
        await asyncio.gather(*(self.ask(random.Random(i)) for i in range(ALL_AT_ONCE)))
        return ALL_AT_ONCE / (time.perf_counter() - start)

    async def at_rate(self, rate: float, seconds: float, seed: int) -> Bill:
        """The bill from the first second until the time is over and the last answer has ended."""
        rng, tasks = random.Random(seed), []
        # The moments of a Poisson process of which it is known how many there are.
        moments = sorted(rng.uniform(0, seconds) for _ in range(max(1, round(rate * seconds))))
        meter = CostMeter(Price.parse(PRICE))
        self.engine.listeners.add(meter)
        start = time.perf_counter()
        for at in moments:
            await asyncio.sleep(max(start + at - time.perf_counter(), 0))
            tasks.append(asyncio.create_task(self.ask(rng)))
        await asyncio.sleep(max(start + seconds - time.perf_counter(), 0))
        await asyncio.gather(*tasks)
        bill = meter.read()
        self.engine.listeners = self.engine.scheduler.listeners = type(self.engine.listeners)()
        return bill


async def play(rounds: int, seconds: float) -> tuple[float, dict[float, list[Bill]]]:
    """The most requests a second, and each share's bills."""
    server = Server()
    async with server.backend:
        await server.at_once()  # the first run warms up
        rate = await server.at_once()
        bills: dict[float, list[Bill]] = {share: [] for share in SHARES}
        for turn in range(rounds):
            for share, found in bills.items():
                found.append(await server.at_rate(share * rate, seconds, seed=turn))
        return rate, bills


def figures_of(bill: Bill) -> dict[str, float]:
    """Of one share in one round."""
    return {
        "requests": bill.num_ended,
        "seconds": bill.total_ns / 1e9,
        "used": bill.utilization,
        "output_tokens": bill.tokens["output"],
        "output_tokens_per_second": bill.tokens["output"] / (bill.total_ns / 1e9),
        "dollars_per_million_output": float(bill.per_output_token) * 1e6,
        "dollars_per_million_output_paid": float(bill.per_token("output")) * 1e6,
    }


def main() -> None:
    args = whole_numbers(__doc__.splitlines()[0], rounds=5, seconds=3)
    torch.set_num_threads(1)
    rate, bills = asyncio.run(play(args.rounds, args.seconds))
    points, rows = [], []
    for share, of_share in bills.items():
        seen = list(map(figures_of, of_share))
        rounds = {key: [one[key] for one in seen] for key in seen[0]}
        kept = {key: quartiles(values) for key, values in rounds.items()}
        point = {key: one["median"] for key, one in kept.items()}
        points.append({"share": share, **point, "rounds": kept})
        rows.append([
            f"{share:.0%}",
            sum(map(int, rounds["requests"])),
            f"{point['used']:.0%}",
            round(point["output_tokens_per_second"]),
            round(point["dollars_per_million_output"], 3),
            round(point["dollars_per_million_output_paid"], 3),
            spread(rounds["dollars_per_million_output"]),
        ])  # fmt: skip
    columns = [
        "requests come at, of the most", "requests", "time that requests pay for", "output tokens/s",
        "$ per million output tokens, all in", "of that paid by requests, for output", "all in, by rounds",
    ]  # fmt: skip
    tables = {"load": {"columns": columns, "rows": rows}}
    first, last = points[0], points[-1]
    figures = {
        "price_per_hour": float(PRICE),
        "most_requests_per_second": rate,
        "points": points,
        "times_dearer": first["dollars_per_million_output"] / last["dollars_per_million_output"],
    }
    workload = {
        "model": MODEL, "seats": SEATS, "rounds": args.rounds, "seconds": args.seconds, "output": OUTPUT,
        "shares": SHARES,
    }  # fmt: skip
    path = record("part19_utilisation", __doc__.splitlines()[0], workload, figures, tables)
    show(path, tables)


if __name__ == "__main__":
    main()
