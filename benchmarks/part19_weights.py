"""What does one more token add to a step: read in a prompt, chosen, or held in the cache?

    python -m benchmarks.part19_weights [--rounds 5]      # about a minute

`storyteller` over pages, as the server has it. Steps of known composition: some sequences that get a token
each, with so many tokens behind them, and beside them so many tokens of a prompt. In each round all
compositions take turns. Of each the fastest step counts, by the processor's time: others' work on the
machine disturbs it least. Least squares, each step weighed by 1 / its time, so that a short step counts as a
long one, and no number below 0:

    time = whatever is in it + input · prompt tokens + output · chosen tokens + held · tokens held

The weights are fitted to the fastest of all rounds. Their spread is that of the rounds, each fitted alone.
"""

import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.record import quartiles, record, show, spread, whole_numbers
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
STEPS = 2  # of each composition in a round, behind one that warms up
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

    def round(self) -> dict[Step, float]:
        """Seconds of the fastest step of each composition."""
        taken: dict[Step, float] = {}
        for decodes in DECODES:
            for context in CONTEXTS if decodes else (0,):
                taken |= self.fastest(decodes, context)
        return taken

    def fastest(self, decodes: int, context: int) -> dict[Step, float]:
        """Seconds of the fastest step of each composition, with each of PROMPTS beside these sequences."""
        talking = self.requests(decodes, context)
        if talking:
            self.run([(request, context) for request in talking])
        best: dict[int, tuple[float, Step]] = {}
        for _ in range(1 + STEPS):  # the first warms up
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


def fitted(taken: list[tuple[Step, float]]) -> tuple[np.ndarray, np.ndarray]:
    """The weights in ns, and by which share each step is off."""
    ns = np.array([seconds * 1e9 for _, seconds in taken])
    features = np.array([(1, *step) for step, _ in taken], dtype=float)
    weights = fit(features, ns)
    return weights, np.abs(features @ weights / ns - 1)


def main() -> None:
    args = whole_numbers(__doc__.splitlines()[0], rounds=5)
    assert len(PROMPTS) * (1 + STEPS) <= GROWS, "so many steps need more room in the cache"
    torch.set_num_threads(1)
    bench = Bench()
    rounds = [list(bench.round().items()) for _ in range(args.rounds)]
    # The compositions come in the same order in each round.
    taken = [min(of_one, key=lambda one: one[1]) for of_one in zip(*rounds, strict=True)]
    steps = [step for step, _ in taken]
    weights, off = fitted(taken)
    by_round = np.array([fitted(one)[0] for one in rounds]).T.tolist()  # [weight][round]
    names = ("base", "input", "output", "held")
    found = {f"{name}_ns": round(float(value)) for name, value in zip(names, weights, strict=True)}
    figures = found | {
        "rounds": {f"{name}_ns": quartiles(ns) for name, ns in zip(names, by_round, strict=True)},
        "steps": len(steps),
        "median_off": float(np.median(off)),
        "p90_off": float(np.quantile(off, 0.9)),
        "worst_off": float(off.max()),
        "worst": dict(zip(("prompt", "chosen", "held"), steps[int(off.argmax())], strict=True)),
    }
    titles = (
        "a step, whatever is in it", "a prompt token (`input`)", "a chosen token (`output`)",
        "a token held (`held`)",
    )  # fmt: skip
    rows = [
        [title, found[f"{name}_ns"] / 1e3, spread([value / 1e3 for value in ns])]
        for title, name, ns in zip(titles, names, by_round, strict=True)
    ]
    tables = {"weights": {"columns": ["one more of", "adds microseconds", "in rounds"], "rows": rows}}
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
