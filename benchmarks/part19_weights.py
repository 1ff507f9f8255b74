"""What does one more token add to a step: read in a prompt, chosen, or held in the cache?

    python -m benchmarks.part19_weights [--rounds 5]

`storyteller` over pages, as the server has it. Steps of known composition: DECODES sequences that get a token
each with CONTEXTS tokens behind them, and beside them PROMPTS tokens of a prompt. Each composition is a step
of its own, run in every round; its time is the least of the rounds, which others' work on the machine
disturbs least. Least squares, each step weighed by 1 / its time, so that a short step counts as a long one:

    time = whatever is in it + input · prompt tokens + output · chosen tokens + held · tokens held
"""

import statistics
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.record import record, show, whole_numbers
from engine.attention.kernels import attention_kernel
from engine.cache.paged import PagedCache
from engine.decoding.params import SamplingParams
from engine.executor import Executor, ModelForward
from engine.layers.packed_linear import pack_linears
from engine.llm_engine import LLMEngine
from engine.models.loader import load_model
from engine.scheduling.continuous import ContinuousScheduler
from engine.scheduling.scheduler import take
from engine.tokenizer import Tokenizer

MODEL = "storyteller"
SEATS = 16
DECODES = (0, 1, 2, 4, 8, 15)
CONTEXTS = (32, 128, 384)
PROMPTS = (0, 16, 48, 96, 192)
WARM_UP = 3  # steps that are not counted
PARAMS = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)


def compositions() -> list[tuple[int, int, int]]:
    """(sequences that decode, tokens behind each, prompt tokens)."""
    return [
        (decodes, context if decodes else 0, prompt)
        for decodes in DECODES
        for context in (CONTEXTS if decodes else CONTEXTS[:1])
        for prompt in PROMPTS
        if decodes or prompt
    ]


class Bench:
    """One model and one cache; a step of any composition."""

    def __init__(self) -> None:
        self.tokenizer = Tokenizer.from_pretrained(MODEL)
        self.model = load_model(MODEL, transform=partial(pack_linears, rows=SEATS))
        config, parameter = self.model.config, next(self.model.parameters())
        kernel = attention_kernel("sdpa", config.head_dim, parameter.device, parameter.dtype)
        self.cache = PagedCache(config, SEATS * 32, 16, kernel=kernel, enable_prefix_caching=False)
        self.executor = Executor(ModelForward(self.model, self.cache))
        scheduler = ContinuousScheduler(self.cache, SEATS, 512)
        self.engine = LLMEngine(self.tokenizer, config, scheduler, self.executor)
        self._made = 0

    def requests(self, number: int, prompt: int) -> list:
        """Admitted, with room for their prompt and a token."""
        made = []
        for _ in range(number):
            self._made += 1
            ids = [(7 * self._made + 13 * i) % 4000 + 1 for i in range(prompt)]
            (request,) = self.engine.make_requests(str(self._made), ids, PARAMS)
            self.cache.begin(request)
            assert self.cache.reserve(request, prompt + WARM_UP + 2)
            made.append(request)
        return made

    def seconds(self, decodes: int, context: int, prompt: int) -> float:
        """One step of this composition; what it needs is computed before, and gone after it."""
        talking = self.requests(decodes, context)
        reading = self.requests(1, prompt) if prompt else []
        if talking:
            for _ in range(1 + WARM_UP):  # the prompts, then a token each
                self.run([(request, request.num_tokens_to_compute) for request in talking])
        work = [(request, 1) for request in talking] + [(request, prompt) for request in reading]
        start = time.perf_counter()
        self.run(work)
        took = time.perf_counter() - start
        for request in (*talking, *reading):
            self.cache.release(request)
        return took

    def run(self, work: list) -> None:
        """A step without a scheduler: everybody's token is taken as it comes."""
        batch = take(work)
        result = self.executor.submit(batch).result()
        for request, tokens in zip(batch.requests, result.tokens, strict=True):
            request.token_ids += tokens


def main() -> None:
    args = whole_numbers(__doc__.splitlines()[0], rounds=5)
    torch.set_num_threads(1)
    bench, steps = Bench(), compositions()
    taken: dict[tuple, list[float]] = {step: [] for step in steps}
    for _ in range(args.rounds):
        for step in steps:
            taken[step].append(bench.seconds(*step))
    ns = np.array([min(taken[step]) * 1e9 for step in steps])
    # By step: one, prompt tokens, chosen tokens, tokens held.
    features = np.array(
        [
            [1, prompt, decodes, decodes * (context + WARM_UP + 1) + prompt]
            for decodes, context, prompt in steps
        ]
    )
    fitted, *_ = np.linalg.lstsq(features / ns[:, None], np.ones(len(steps)), rcond=None)
    off = np.abs(features @ fitted / ns - 1)
    names = ("base", "input", "output", "held")
    found = {f"{name}_ns": round(float(value)) for name, value in zip(names, fitted, strict=True)}
    spread = statistics.median(statistics.median(times) / min(times) for times in taken.values()) - 1
    figures = found | {
        "steps": len(steps),
        "median_off": float(np.median(off)),
        "p90_off": float(np.quantile(off, 0.9)),
        "worst_off": float(off.max()),
        "worst": dict(zip(("decodes", "context", "prompt"), steps[int(off.argmax())], strict=True)),
        "spread_of_rounds": spread,
    }
    rows = [
        ["a step, whatever is in it", found["base_ns"] / 1e3],
        ["a prompt token (`input`)", found["input_ns"] / 1e3],
        ["a chosen token (`output`)", found["output_ns"] / 1e3],
        ["a token held (`held`)", found["held_ns"] / 1e3],
    ]
    tables = {"weights": {"columns": ["one more of", "adds microseconds"], "rows": rows}}
    path = record(
        "part19_weights",
        __doc__.splitlines()[0],
        {
            "model": MODEL, "decodes": DECODES, "contexts": CONTEXTS, "prompts": PROMPTS,
            "rounds": args.rounds, "cache": "pages of 16 tokens", "attention": "sdpa",
        },
        figures,
        tables,
    )  # fmt: skip
    show(path, tables)
    print(f"off by {figures['median_off']:.0%} in the median, {figures['worst_off']:.0%} at worst")
    weights = [max(found[f"{name}_ns"], least) for name, least in (("input", 1), ("output", 1), ("held", 0))]
    print("as an operator's option: --cost-weights " + ",".join(map(str, weights)))


if __name__ == "__main__":
    main()
