"""What masks cost: steps of 32 requests that must fit a schema, of 32 that need not, and of both halves.

    python -m benchmarks.partB_masks
    python -m benchmarks.partB_masks --rounds 1 --tokens 12   # a quick look, not written down

One engine in one process runs the three by turns, so that what else the machine does meets all alike. A step
counts once all its requests are past their prompts. The masks' own time is that of the capability's
`before_submit`; what applying them takes is in the difference of the steps.
"""

import time
from collections.abc import Iterator
from statistics import median

from benchmarks.record import record, show, whole_numbers
from engine import EngineArgs, SamplingParams
from engine.core.llm_engine import LLMEngine
from engine.decoding.structured import StructuredOutputsParams
from engine.wiring.compose import build_engine

REQUESTS = 32
PROMPT = "Once upon a time, there was a dog. The dog said:"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "friends": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "friends"],
    "additionalProperties": False,
}
MIXES = {"none must fit": 0, "half must fit": REQUESTS // 2, "all must fit": REQUESTS}


class Clock:
    """A capability around the one that makes masks, which times it."""

    def __init__(self, inner) -> None:
        self.inner, self.seconds = inner, 0.0

    def before_submit(self, step):
        start = time.perf_counter()
        batch = self.inner.before_submit(step)
        self.seconds += time.perf_counter() - start
        return batch

    def must_land_first(self, step):
        return self.inner.must_land_first(step)

    def after_result(self, step, result):
        return self.inner.after_result(step, result)


def steps(engine: LLMEngine, clock: Clock, num_fitting: int, tokens: int) -> Iterator[tuple[float, float]]:
    """(seconds of the step, seconds of its masks) for each step of 32 tokens."""
    must_fit = StructuredOutputsParams(json=PERSON, disable_any_whitespace=True)
    for i in range(REQUESTS):
        structure = must_fit if i < num_fitting else None
        params = SamplingParams(
            temperature=0.8, seed=i, max_tokens=tokens, ignore_eos=True, structured_outputs=structure
        )
        engine.add_request(f"{i}", PROMPT, params)
    while engine.has_unfinished_requests():
        is_decoding = all(len(r.output.token_ids) for r in engine.scheduler.running)
        count = len(engine.scheduler.running)
        clock.seconds, start = 0.0, time.perf_counter()
        engine.step()
        if is_decoding and count == REQUESTS:
            yield time.perf_counter() - start, clock.seconds


def main() -> None:
    options = whole_numbers(__doc__.splitlines()[0], rounds=8, tokens=64)
    engine = build_engine(EngineArgs(model="storyteller", device="cpu", max_num_seqs=REQUESTS))
    clock = Clock(engine.capabilities[-1])
    engine.capabilities[-1] = clock
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in MIXES}
    for num_fitting in MIXES.values():  # compiled and warm
        list(steps(engine, clock, num_fitting, 4))
    for _ in range(options.rounds):
        for name, num_fitting in MIXES.items():
            found[name] += steps(engine, clock, num_fitting, options.tokens)
    rows = []
    for name, times in found.items():
        step, masks = (1000 * median(column) for column in zip(*times, strict=True))
        rows.append([name, round(step, 2), round(masks, 2), round(100 * masks / step, 1)])
    free, _, all_fit = (row[1] for row in rows)
    tables = {"steps": {"columns": ["of 32 requests", "step, ms", "masks, ms", "share, %"], "rows": rows}}
    figures = {
        "masks_share_percent": rows[-1][3],
        "step_longer_percent": round(100 * (all_fit / free - 1), 1),
    }
    workload = {
        "model": "storyteller",
        "requests": REQUESTS,
        "tokens": options.tokens,
        "rounds": options.rounds,
    }
    if options.rounds < 8:
        print(figures, *rows, sep="\n")
        return
    question = "What share of a step do masks take?"
    show(record("partB_masks", question, workload, figures, tables), tables)


if __name__ == "__main__":
    main()
