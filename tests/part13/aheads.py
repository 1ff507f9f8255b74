"""What tests of steps in flight share: a fake model that runs one step ahead, and what it was given."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from engine.cache.manager import KVCacheManager
from engine.core.ahead import AheadEngine
from engine.core.llm_engine import LLMEngine
from engine.decoding.logprobs import SUPPORTS
from engine.decoding.outputs import RequestOutput
from engine.decoding.params import SamplingParams
from engine.execution.last_tokens import LastTokens
from engine.execution.runner import Logits, ModelRunner
from engine.execution.scores import logprobs_of
from engine.requests.batch import Batch
from engine.scheduling.continuous import ContinuousScheduler
from engine.scheduling.scored_rows import scored_rows
from tests.part06.fakes import (
    CONFIG,
    TOKENIZER,
    FakeForward,
    told_alone,
)
from tests.part10.test_scored_engine import assert_right
from tests.part12.pages import PageReader, WatchedCache

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
MOST_STEPS = 2000  # more than any test here needs


class FakeAhead:
    """A runner's way: the fake model, which finds its tokens as a real one does."""

    def __init__(self, cache: KVCacheManager, last: LastTokens) -> None:
        self.last = last
        self.fake = PageReader(cache) if isinstance(cache, WatchedCache) else FakeForward(cache)
        self.seen: list[dict[str, int]] = []  # by step: the last token that each request came with
        self.broken: dict[str, int] = {}  # request -> the position after which nothing can be chosen

    def fits(self, batch: Batch) -> bool:
        return True

    def __call__(self, batch: Batch) -> Logits:
        """Of a prompt's rows that are to be scored the logits, too: `hidden` and logits are the same here."""
        rows, token_ids = batch.rows, self.last.upload(batch, CPU).token_ids.tolist()
        self.seen.append(
            {name: token_ids[end - 1] for name, end in zip(batch.ids, batch.query_start[1:], strict=True)}
        )
        wanted = sorted({*rows.chosen, *rows.prompt_rows})
        asked = replace(batch, token_ids=tuple(token_ids), rows=replace(rows, chosen=tuple(wanted)))
        logits = self.fake(asked).values
        values = logits[[wanted.index(row) for row in rows.chosen]]  # [R, V]
        names = (
            name for name, count in zip(batch.ids, rows.chosen_counts, strict=True) for _ in range(count)
        )
        for i, (name, row) in enumerate(zip(names, rows.chosen, strict=True)):
            if self.broken.get(name) == batch.positions[row]:
                values[i] = torch.nan
        prompt = (
            logits[[wanted.index(row) for row in rows.prompt_rows]] if rows.prompt_rows else None
        )  # [N, V]
        return Logits(values, prompt_hidden=prompt)


def fake_runner(cache: KVCacheManager, seats: int, runner_class=ModelRunner) -> ModelRunner:
    """Runs the fake model over this cache, and checks a watched one before each step."""
    last, watched = LastTokens(seats, CPU), isinstance(cache, WatchedCache)
    return runner_class(
        [FakeAhead(cache, last)], cache.memory if watched else None, before=[cache.check] if watched else [],
        scores=logprobs_of(TOKENIZER, lambda hidden: hidden), last_tokens=last,
    )  # fmt: skip


def ahead(cache, seats=5, budget=24, runner_class=ModelRunner, **options) -> AheadEngine:
    runner = fake_runner(cache, seats, runner_class)
    scheduler = ContinuousScheduler(cache, seats, budget, select_rows=scored_rows)
    return AheadEngine(TOKENIZER, CONFIG, scheduler, runner, supports=SUPPORTS, **options)


def forward_of(engine: AheadEngine) -> FakeAhead:
    return engine.executor.ways[0]


def steps_of(engine: LLMEngine) -> Iterator[list[RequestOutput]]:
    """What each step gives, until nothing is unfinished."""
    for _ in range(MOST_STEPS):
        if not engine.has_unfinished_requests():
            return
        yield engine.step()
    raise AssertionError("the engine comes to no end")


def run_to_end(engine: LLMEngine) -> dict[str, RequestOutput]:
    """request id -> its last output."""
    return {
        output.request_id: output for outputs in steps_of(engine) for output in outputs if output.finished
    }


def log_of(engine: AheadEngine) -> list[str]:
    """What it does from now on: "launch" for each step that somebody is in, and "land"."""
    log, launch, land = [], engine.launch, engine.land

    def launching():
        step = launch()
        log.extend(["launch"] if step else [])
        return step

    def landing(step):
        log.append("land")
        return land(step)

    engine.launch, engine.land = launching, landing
    return log


def mixed(i: int) -> SamplingParams:
    """Greedy, sampled, with penalties, stop strings, several samples, log probabilities."""
    kind = [
        {"temperature": 0},
        {"temperature": 0.9},
        {"temperature": 0, "repetition_penalty": 1.4, "frequency_penalty": 0.5, "min_tokens": 3},
        {"temperature": 1.0, "stop": ("a", "e", "zz")},
        {"temperature": 0.8, "n": 2},
        {"temperature": 0, "logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 0.7, "logprobs": 3, "top_k": 9},
    ][i % 7]
    return SamplingParams(seed=i, max_tokens=4 + i % 17, **kind)


def assert_told(output, prompt: str, params: SamplingParams) -> None:
    """What the fake model says to this prompt alone, and its scores, if asked for."""
    assert output.error is None
    quiet = replace(params, logprobs=None, prompt_logprobs=None)
    for index, sample in enumerate(output.outputs):
        want = told_alone(prompt, quiet, index)
        assert sample.token_ids == want.token_ids, "the tokens are those of one step at a time"
        assert (sample.text, sample.finish_reason) == (want.text, want.finish_reason), "so are text and end"
    if params.prompt_logprobs is not None:
        assert_right(output, params)
