"""Part 6's engines, with runners that score."""

import pytest

from engine.cache.slots import SlotMemory
from engine.core.llm_engine import LLMEngine
from engine.decoding.logprobs import SUPPORTS
from engine.execution.runner import EagerWay, ModelRunner
from engine.execution.scores import logprobs_of
from engine.scheduling.continuous import ContinuousScheduler
from engine.scheduling.scored_rows import scored_rows
from tests.part04.conftest import alone, model, tokenizer  # noqa: F401
from tests.part06.conftest import fake_engine, passed, pytest_runtest_makereport  # noqa: F401
from tests.part06.fakes import TOKENIZER, BlockCache, assert_idle
from tests.part10.scored import ScoringFake


@pytest.fixture
def scoring_engine(fake_engine):  # noqa: F811
    """scoring_engine(seats, budget, blocks, **options) -> continuous batching over the fake model, scored."""

    def make(seats=8, budget=64, blocks=64, forward=None, **options) -> LLMEngine:
        cache = BlockCache(num_blocks=blocks, block_tokens=8)
        forward = forward or ScoringFake(cache)
        forward.cache = cache
        return fake_engine(
            lambda cache: ContinuousScheduler(cache, seats, budget, select_rows=scored_rows),
            cache,
            executor=ModelRunner([forward], scores=logprobs_of(TOKENIZER, forward.logits)),
            supports=SUPPORTS,
            **options,
        )

    return make


@pytest.fixture
def engine_over(passed):  # noqa: F811
    """engine_over(model, tokenizer, seats, budget) -> continuous batching over a real model, scored."""
    made = []

    def make(model, tokenizer, seats=4, budget=64) -> LLMEngine:  # noqa: F811
        memory = SlotMemory(model.config, seats)
        scheduler = ContinuousScheduler(memory.plan(), seats, budget, select_rows=scored_rows)
        scores = logprobs_of(tokenizer, model.logits)
        runner = ModelRunner([EagerWay(model, memory)], memory, scores=scores)
        made.append(LLMEngine(tokenizer, model.config, scheduler, runner, supports=SUPPORTS))
        return made[-1]

    yield make
    for engine in made if passed() else ():
        assert_idle(engine)
