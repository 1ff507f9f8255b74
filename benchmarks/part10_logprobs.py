"""What do log probabilities cost a step, and a prompt?

    python -m benchmarks.part10_logprobs [--rounds 5] [--tokens 14]  # three minutes on a quiet machine

Whole steps of the engine, in which every request asks for 0, 1, 5 or 20 of the likeliest tokens, beside
steps in which nobody asks, and beside Part 6's executor, which cannot be asked: for 1 and 32 requests, with
storyteller and with random weights in the shape of GPT-2 124M. The sides take turns; compared are medians of
processor time, on one thread.
`scorer`: the processor time inside the scores themselves, in the same steps, with the least and the most of
the rounds; what whole steps differ by is more than this.
`prompt`: one prompt read with and without its tokens' log probabilities. `bytes_per_token`: what a token's
scores take as the engine keeps them, and as a dict of records.
"""

import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import torch

from benchmarks.record import middle, quartiles, record, show, whole_numbers
from benchmarks.workloads import gpt2_like, ratios, rounds
from engine.cache.slots import SlotMemory
from engine.core.llm_engine import LLMEngine
from engine.decoding.logprobs import SUPPORTS, TokenScores
from engine.decoding.params import SamplingParams
from engine.execution.runner import EagerWay, ModelRunner
from engine.execution.scores import ChosenLogprobs, PromptLogprobs, logprobs_of
from engine.layers.packed_linear import pack_linears
from engine.machine.collector import rare_collections
from engine.models.loader import load_model
from engine.scheduling.continuous import ContinuousScheduler
from engine.scheduling.scored_rows import scored_rows
from engine.text.tokenizer import Tokenizer

MODELS = {"storyteller": None, "GPT-2 124M's shape": (12, 768, 12, 50257)}
BATCHES = (1, 32)
SIDES = {"cannot be asked": None, "nobody asks": None, "0": 0, "1": 1, "5": 5, "20": 20}
PROMPT = 8  # tokens of each prompt
ROOM = 64  # tokens of each request's cache
LONG = 384  # tokens of the prompt that is scored
FIRST = 3  # steps that are not counted: prompts are read in them


class Timed:
    """A `Score` whose processor time is added up in `seconds`."""

    def __init__(self, score: ChosenLogprobs | PromptLogprobs) -> None:
        self.score, self.seconds = score, 0.0

    def __call__(self, *arguments):
        return self._timed(self.score, *arguments)

    def add_to(self, *arguments):
        return self._timed(self.score.add_to, *arguments)

    def _timed(self, call, *arguments):
        start = time.process_time()
        found = call(*arguments)
        self.seconds += time.process_time() - start
        return found


class Bench:
    """One model, one cache, and an engine for each side over both."""

    def __init__(self, where: str | Path, load_format: str, seats: int, room: int = ROOM) -> None:
        self.tokenizer, self.random = Tokenizer.from_pretrained(where), Random(0)
        self.model = load_model(
            where, load_format=load_format, transform=partial(pack_linears, rows=max(BATCHES))
        )
        self.memory = SlotMemory(self.model.config, seats, room)
        self.seats, self.room = seats, room
        self.scores: list[Timed] = []  # of the engine made last
        self.inside: dict[tuple[str, int], list[float]] = {}  # (side, requests) -> ms in the scores, per step

    def engine(self, scoring: bool = True) -> LLMEngine:
        scores = [Timed(score) for score in logprobs_of(self.tokenizer, self.model.logits)] if scoring else []
        self.scores = scores
        budget = max(512, self.seats)
        return LLMEngine(
            self.tokenizer,
            self.model.config,
            ContinuousScheduler(self.memory.plan(), self.seats, budget, select_rows=scored_rows),
            ModelRunner([EagerWay(self.model, self.memory)], self.memory, scores=scores),
            supports=SUPPORTS,
            max_model_len=self.room,
        )

    def prompt(self, tokens: int) -> list[int]:
        return [self.random.randrange(1, 4096) for _ in range(tokens)]

    def step_seconds(self, side: str, requests: int, tokens: int) -> float:
        """Median of the steps in which all requests decode."""
        engine = self.engine(side != "cannot be asked")
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=SIDES[side])
        for i in range(requests):
            engine.add_request(str(i), self.prompt(PROMPT), params)
        taken, inside = [], []
        while engine.has_unfinished_requests():
            before, start = self.seconds_inside(), time.process_time()
            engine.step()
            taken.append(time.process_time() - start)
            inside.append(self.seconds_inside() - before)
        self.inside.setdefault((side, requests), []).append(statistics.median(inside[FIRST:]) * 1e3)
        return statistics.median(taken[FIRST:])

    def seconds_inside(self) -> float:
        """Processor time inside the scores of the engine made last."""
        return sum(score.seconds for score in self.scores)

    def prompt_seconds(self, n: int | None) -> float:
        """From a prompt's arrival to its first token."""
        engine = self.engine()
        engine.add_request(
            "0", self.prompt(LONG), SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=n)
        )
        start = time.process_time()
        engine.step()
        seconds = time.process_time() - start
        assert not engine.has_unfinished_requests()
        return seconds


def own_arrays(scores: TokenScores) -> TokenScores:
    """A copy that holds all of its numbers: `scores` are a view of those of a whole prompt."""
    return TokenScores(scores._ids.copy(), scores._logprobs.copy(), scores._rank, scores._text_of)


def bytes_per_token(bench: Bench, n: int, as_dict: bool) -> float:
    """Memory that the scores of a prompt's tokens hold, beyond those of the first run."""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=n)
    kept = []
    for turn in range(2):
        engine = bench.engine()
        engine.add_request("0", bench.prompt(LONG), params)
        (output,) = engine.step()
        if turn:
            tracemalloc.start()
            kept = [dict(scores) if as_dict else own_arrays(scores) for scores in output.prompt_logprobs[1:]]
            held, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
    return held / len(kept)


def in_turns(
    sides: dict[str, Callable[[], float]], number: int, to: str
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """The median ms of each side, and by round its time over that of the side `to`. A round before them warms
    up.
    """
    rounds(sides, 1)
    seconds = rounds(sides, number)
    return {side: statistics.median(s) * 1e3 for side, s in seconds.items()}, ratios(seconds, to)


def kept(of: dict[str, list[float]]) -> dict[str, dict]:
    """Ratios as the record has them."""
    return {
        "ratio": {side: statistics.median(values) for side, values in of.items()},
        "ratio_rounds": {side: quartiles(values) for side, values in of.items()},
    }


@rare_collections()
def main() -> None:
    arguments = whole_numbers(__doc__.splitlines()[0], rounds=5, tokens=14)
    torch.set_num_threads(1)
    rows, prompts, scorers, figures = [], [], [], {"step": {}, "prompt": {}, "scorer": {}}
    with tempfile.TemporaryDirectory() as folder:
        for name, shape in MODELS.items():
            where = gpt2_like(Path(folder), *shape) if shape else name
            bench = Bench(where, "dummy" if shape else "auto", max(BATCHES))
            for requests in BATCHES:
                sides = {
                    side: partial(bench.step_seconds, side, requests, arguments.tokens) for side in SIDES
                }
                ms, of = in_turns(sides, arguments.rounds, "cannot be asked")
                rows.append([name, requests, ms["cannot be asked"], *map(middle, list(of.values())[1:])])
                key = "gpt2_shape" if shape else name
                figures["step"][f"{key}_{requests}"] = {"ms": ms} | kept(of)
                inside = {side: bench.inside[side, requests][1:] for side in list(SIDES)[1:]}
                figures["scorer"][f"{key}_{requests}"] = {"ms_of_rounds": inside}
                scorers.append([name, requests, ms["nobody asks"], *map(middle, inside.values())])
            # One slot, long enough for the prompt.
            bench.memory, bench.seats, bench.room = SlotMemory(bench.model.config, 1, LONG + 8), 1, LONG + 8
            sides = {str(n): partial(bench.prompt_seconds, n) for n in (None, 0, 5, 20)}
            ms, of = in_turns(sides, arguments.rounds, "None")
            prompts.append([name, LONG, ms["None"], *(middle(of[n]) for n in ("0", "5", "20"))])
            figures["prompt"]["gpt2_shape" if shape else name] = {"ms": ms} | kept(of)
            if not shape:
                figures["bytes_per_token"] = {
                    "arrays": bytes_per_token(bench, 20, as_dict=False),
                    "dict": bytes_per_token(bench, 20, as_dict=True),
                }
    step = {
        "columns": [
            "model", "requests", "step that cannot be asked, processor ms", "nobody asks", "logprobs 0", "1",
            "5", "20",
        ],
        "rows": rows,
    }  # fmt: skip
    prompt = {
        "columns": ["model", "prompt tokens", "read, processor ms", "prompt_logprobs 0", "5", "20"],
        "rows": prompts,
    }
    scorer = {
        "columns": [
            "model", "requests", "step, nobody asks, processor ms", "inside the scores, ms: nobody asks",
            "logprobs 0", "1", "5", "20",
        ],
        "rows": scorers,
    }  # fmt: skip
    workload = {
        "prompt_tokens": PROMPT, "output_tokens": arguments.tokens, "rounds": arguments.rounds,
        "statistic": "processor time, median of steps, median of rounds", "sides": list(SIDES),
        "dtype": "float32",
    }  # fmt: skip
    tables = {"step": step, "prompt": prompt, "scorer": scorer}
    show(record("part10_logprobs", "What do log probabilities cost?", workload, figures, tables), tables)
    print(figures["bytes_per_token"])


if __name__ == "__main__":
    main()
