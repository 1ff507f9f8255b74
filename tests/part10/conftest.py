"""Part 6's engines, with an executor that scores."""

import pytest

from engine.cache.slots import SlotCache
from engine.decoding.logprobs import SUPPORTS
from engine.executor import ModelForward
from engine.llm_engine import LLMEngine
from engine.scheduling.continuous import ContinuousScheduler
from engine.scoring import ScoringExecutor
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
            lambda cache: ContinuousScheduler(cache, seats, budget),
            cache,
            executor=ScoringExecutor(forward, TOKENIZER),
            supports=SUPPORTS,
            **options,
        )

    return make


@pytest.fixture
def engine_over(passed):  # noqa: F811
    """engine_over(model, tokenizer, seats, budget) -> continuous batching over a real model, scored."""
    made = []

    def make(model, tokenizer, seats=4, budget=64) -> LLMEngine:  # noqa: F811
        cache = SlotCache(model.config, seats)
        scheduler = ContinuousScheduler(cache, seats, budget)
        executor = ScoringExecutor(ModelForward(model, cache), tokenizer)
        made.append(LLMEngine(tokenizer, model.config, scheduler, executor, supports=SUPPORTS))
        return made[-1]

    yield make
    for engine in made if passed() else ():
        assert_idle(engine)
