"""What does one more token add to a step: read in a prompt, chosen, or held in the cache?

    python -m benchmarks.part19_weights [--rounds 6]

`storyteller` over pages, as the server has it. Steps of known composition: some sequences that get a token
each, with so many tokens behind them, and beside them so many tokens of a prompt. Of each composition the
fastest of the rounds counts, by the processor's time: others' work on the machine disturbs it least. Least
squares, each step weighed by 1 / its time, so that a short step counts as a long one, and no number below 0:

    time = whatever is in it + input · prompt tokens + output · chosen tokens + held · tokens held
"""

import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.record import record, show, whole_numbers
from engine.cache.memory import PageMemory
from engine.core.llm_engine import LLMEngine
from engine.decoding.params import SamplingParams
from engine.execution.runner import EagerWay, ModelRunner
from engine.layers.packed_linear import pack_linears
from engine.models.loader import load_model
from engine.scheduling.continuous import ContinuousScheduler
from engine.text.tokenizer import Tokenizer
from engine.wiring.attention_kernel import attention_kernel

MODEL = "storyteller"
SEATS = 16
DECODES = (0, 1, 2, 4, 8, 15)
CONTEXTS = (32, 128, 384)
PROMPTS = (0, 16, 48, 96, 192)
GROWS = 64  # tokens that a sequence may get here, at most
PARAMS = SamplingParams(temperature=0, max_tokens=GROWS, ignore_eos=True)
Step = tuple[int, int, int]  # prompt tokens, chosen tokens, tokens held


class Bench:
    """One model and one cache; a step of any composition."""

    def __init__(self) -> None:
        self.tokenizer = Tokenizer.from_pretrained(MODEL)
        self.model = load_model(MODEL, transform=partial(pack_linears, rows=SEATS))
        config, parameter = self.model.config, next(self.model.parameters())
        kernel = attention_kernel("sdpa", config.head_dim, parameter.device, parameter.dtype)
        memory = PageMemory(config, SEATS * 40, 16, kernel=kernel)
        self.cache = memory.plan(enable_prefix_caching=False)
        self.runner = ModelRunner([EagerWay(self.model, memory)], memory)
        self.scheduler = ContinuousScheduler(self.cache, SEATS, 512)
        self.engine = LLMEngine(self.tokenizer, config, self.scheduler, self.runner)
        self._made = 0

    def requests(self, number: int, prompt: int) -> list:
        """Admitted, with room for their prompt and GROWS tokens."""
        made = []
        for _ in range(number):
            self._made += 1
            ids = [(7 * self._made + 13 * i) % 4000 + 1 for i in range(prompt)]
            (request,) = self.engine.make_requests(str(self._made), ids, PARAMS)
            self.cache.admit(request)
            assert self.cache.reserve(request, prompt + GROWS)
            made.append(request)
        return made

    def fastest(self, decodes: int, context: int, rounds: int) -> dict[Step, float]:
        """Seconds of the fastest step of each composition, with each of PROMPTS beside these sequences."""
        talking = self.requests(decodes, context)
        if talking:
            self.run([(request, context) for request in talking])
        best: dict[int, tuple[float, Step]] = {}
        for _ in range(1 + rounds):  # the first warms up
            for prompt in PROMPTS:
                if not talking and not prompt:
                    continue
                reading = self.requests(1, prompt) if prompt else []
                work = [(request, 1) for request in talking] + [(request, prompt) for request in reading]
                start = time.thread_time()
                held = self.run(work)
                found = (time.thread_time() - start, (prompt, decodes, held))
                best[prompt] = min(best.get(prompt, found), found)
                for request in reading:
                    self.cache.release(request)
        for request in talking:
            self.cache.release(request)
        return {step: seconds for seconds, step in best.values()}

    def run(self, work: list) -> int:
        """A step without a scheduler: everybody's token is taken as it comes. Gives the tokens held."""
        step = self.scheduler.make_step(work)
        result = self.runner.submit(step.batch).result()
        for request, tokens in zip(step.requests, result.tokens, strict=True):
            request.token_ids += tokens
        return sum(step.batch.context_lens)


def fit(features: np.ndarray, ns: np.ndarray) -> np.ndarray:
    """Least squares with no number below 0: the most negative column is left out until there is none."""
    columns = list(range(features.shape[1]))
    while True:
        solved, *_ = np.linalg.lstsq(features[:, columns] / ns[:, None], np.ones(len(ns)), rcond=None)
        if solved.min() >= 0:
            found = np.zeros(features.shape[1])
            found[columns] = solved
            return found
        del columns[int(solved.argmin())]


def main() -> None:
    args = whole_numbers(__doc__.splitlines()[0], rounds=6)
    assert len(PROMPTS) * (1 + args.rounds) <= GROWS, "so many rounds need more room in the cache"
    torch.set_num_threads(1)
    bench, taken = Bench(), {}
    for decodes in DECODES:
        for context in CONTEXTS if decodes else (0,):
            taken |= bench.fastest(decodes, context, args.rounds)
    steps = list(taken)
    ns = np.array([taken[step] * 1e9 for step in steps])
    features = np.array([(1, *step) for step in steps], dtype=float)
    fitted = fit(features, ns)
    off = np.abs(features @ fitted / ns - 1)
    names = ("base", "input", "output", "held")
    found = {f"{name}_ns": round(float(value)) for name, value in zip(names, fitted, strict=True)}
    figures = found | {
        "steps": len(steps),
        "median_off": float(np.median(off)),
        "p90_off": float(np.quantile(off, 0.9)),
        "worst_off": float(off.max()),
        "worst": dict(zip(("prompt", "chosen", "held"), steps[int(off.argmax())], strict=True)),
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
