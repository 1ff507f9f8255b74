"""Five sick servers and a healthy one, to be told apart by their metrics alone.

    python -m benchmarks.part11_sick      # prints what each shows, and records nothing

Each is Part 8's engine with a load, stepped until all is done. Requests come by steps and not by a clock, so
what is counted is the same on every machine. The notebook of Part 11 shows the readings without the names.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

import torch
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from rich import print

from benchmarks.part08_gantt import TightCache
from engine.cache.slots import SlotMemory
from engine.core.llm_engine import LLMEngine
from engine.decoding.params import SamplingParams
from engine.execution.runner import EagerWay, ModelRunner
from engine.models.loader import load_model
from engine.scheduling.continuous import ContinuousScheduler
from engine.telemetry.histogram import quantile
from engine.telemetry.metrics import EngineMetrics
from engine.text.tokenizer import Tokenizer

REQUESTS, OUTPUT = 24, 40  # of each server; tokens of each answer
SHORT, MIDDLE, LONG = 16, 200, 900  # tokens of a prompt


@dataclass(frozen=True)
class Server:
    """Its limits, and its load: `together` requests come every `every` steps, with these prompts in turn."""

    seats: int = 8
    budget: int = 64
    room: int | None = None  # tokens of all sequences together; None: enough
    every: int = 6
    together: int = 1
    prompts: tuple[int, ...] = field(default=(SHORT,))  # their lengths in tokens
    leaves_after: int | None = None  # tokens that a client waits for before it leaves; None: for all


HEALTHY = Server()
SICK = {
    "too few seats": Server(seats=2),
    "one guest with long prompts": Server(prompts=(SHORT,) * 5 + (LONG,)),
    "a budget that is too large": Server(budget=1024, every=24, together=4, prompts=(MIDDLE,)),
    "too little memory": Server(room=150),
    "clients that leave": Server(leaves_after=3),
}


def serve(tokenizer: Tokenizer, model, server: Server) -> str:
    """Let the server work through its load. Returns what its /metrics says then."""
    memory = SlotMemory(model.config, server.seats, server.room)
    cache = TightCache(server.seats, server.room) if server.room else memory.plan()
    scheduler = ContinuousScheduler(cache, server.seats, server.budget)
    runner = ModelRunner([EagerWay(model, memory)], memory)
    engine = LLMEngine(tokenizer, model.config, scheduler, runner, max_model_len=server.room)
    metrics = EngineMetrics(engine, "storyteller")
    requests = _requests(server)
    step = 0
    while requests or engine.has_unfinished_requests():
        for _ in range(server.together if requests and step % server.every == 0 else 0):
            name, prompt = requests.pop(0)
            engine.add_request(
                name, prompt, SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
            )
        step += 1
        outputs = engine.step() if engine.has_unfinished_requests() else []
        for output in outputs:
            if len(output.outputs[0].token_ids) == server.leaves_after:
                engine.abort_request(output.request_id)
    return generate_latest(metrics.registry).decode()


def _requests(server: Server) -> list[tuple[str, list[int]]]:
    """(name, prompt) of each request, in the order of arrival."""
    random = Random(0)
    lengths = [server.prompts[i % len(server.prompts)] for i in range(REQUESTS)]
    return [(str(i), [random.randrange(300, 4000) for _ in range(n)]) for i, n in enumerate(lengths)]


class Scrape:
    """What one answer of /metrics says."""

    def __init__(self, text: str) -> None:
        self._samples = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]

    def total(self, name: str, **labels: str) -> float:
        """The sum of the samples called `name` that have these labels."""
        return sum(sample.value for sample in self._named(name) if labels.items() <= sample.labels.items())

    def mean(self, histogram: str) -> float:
        """The sum of its observations by their number."""
        return self.total(f"{histogram}_sum") / max(1, self.total(f"{histogram}_count"))

    def quantile(self, q: float, histogram: str) -> float | None:
        """Estimated from the buckets."""
        buckets = {float(s.labels["le"]): int(s.value) for s in self._named(f"{histogram}_bucket")}
        *bounds, _ = buckets
        return quantile(q, bounds, list(buckets.values()))

    def _named(self, name: str) -> Iterator:
        return (sample for sample in self._samples if sample.name == name)


def counted(scrape: Scrape) -> dict[str, float]:
    """What does not depend on the machine."""
    steps = scrape.total("ruvon:steps_total")
    return {
        "ended well": scrape.total("vllm:request_success_total", finished_reason="length"),
        "aborted": scrape.total("ruvon:requests_ended_early_total", reason="abort"),
        "preemptions": scrape.total("vllm:num_preemptions_total"),
        "prompt, mean tokens": round(scrape.mean("vllm:request_prompt_tokens")),
        "prompt, p95": scrape.quantile(0.95, "vllm:request_prompt_tokens"),
        "requests per step": round(scrape.total("ruvon:step_sequences_total") / steps, 1),
        "tokens per step": round(scrape.total("ruvon:step_tokens_total") / steps, 1),
    }


def timed(scrape: Scrape) -> dict[str, float]:
    """Milliseconds, which are the machine's."""
    times = {
        name: scrape.mean(f"vllm:request_{name}_time_seconds") for name in ("queue", "prefill", "decode")
    }
    found = {f"{name}, mean": seconds for name, seconds in times.items()}
    for name in ("p50", "p99"):
        q = int(name[1:]) / 100
        found[f"step, {name}"] = scrape.quantile(q, "ruvon:step_seconds") or 0.0
    return {name: round(seconds * 1e3, 1) for name, seconds in found.items()}


def main() -> None:
    torch.set_num_threads(1)
    tokenizer, model = Tokenizer.from_pretrained("storyteller"), load_model("storyteller")
    for name, server in {"healthy": HEALTHY, **SICK}.items():
        scrape = Scrape(serve(tokenizer, model, server))
        print(name, counted(scrape), timed(scrape))


if __name__ == "__main__":
    main()
