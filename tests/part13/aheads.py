"""What tests of steps in flight share: a fake model that runs one step ahead, and what it was given."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from engine.ahead import AheadEngine, AheadExecutor, AheadForward, LastTokens
from engine.cache.paged import PagedCache
from engine.decoding.logprobs import SUPPORTS
from engine.decoding.outputs import RequestOutput
from engine.decoding.params import SamplingParams
from engine.llm_engine import LLMEngine
from engine.scheduling.continuous import ContinuousScheduler
from tests.part06.fakes import (
    CONFIG,
    TOKENIZER,
    FakeForward,
    told_alone,
)
from tests.part10.test_scoring_executor import assert_right
from tests.part12.pages import PageReader

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
MOST_STEPS = 2000  # more than any test here needs


class FakeAhead(AheadForward):
    """The fake model, which finds its tokens as a real one does."""

    def __init__(self, cache, last: LastTokens) -> None:
        super().__init__(nn.Linear(1, 1), cache, last)
        self.fake = PageReader(cache) if isinstance(cache, PagedCache) else FakeForward(cache)
        self.seen: list[dict[str, int]] = []  # by step: the last token that each request came with
        self.broken: dict[str, int] = {}  # request -> the position after which nothing can be chosen

    def hidden(self, batch):
        token_ids = self.inputs(batch)[0].tolist()
        self.seen.append(
            {r.id: token_ids[end - 1] for r, end in zip(batch.requests, batch.query_start[1:], strict=True)}
        )
        logits = self.fake(replace(batch, token_ids=tuple(token_ids)))
        rows = [(r.id, batch.positions[i]) for r, own in zip(batch.requests, batch.logit_rows) for i in own]
        for row, (name, position) in enumerate(rows):
            if self.broken.get(name) == position:
                logits[row] = torch.nan
        return logits

    def logits(self, hidden):
        return hidden


def ahead(cache, seats=5, budget=24, executor_class=AheadExecutor, **options) -> AheadEngine:
    last = LastTokens(seats, CPU)
    executor = executor_class(FakeAhead(cache, last), TOKENIZER, last)
    scheduler = ContinuousScheduler(cache, seats, budget)
    return AheadEngine(TOKENIZER, CONFIG, scheduler, executor, supports=SUPPORTS, **options)


def forward_of(engine: AheadEngine) -> FakeAhead:
    return engine.executor.forward


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
        flight = launch()
        log.extend(["launch"] if flight else [])
        return flight

    def landing(flight):
        log.append("land")
        return land(flight)

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
