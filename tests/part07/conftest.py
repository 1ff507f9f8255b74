"""The fixtures of Part 6, and an engine whose sequences lie in slots."""

import pytest

from engine.cache.slots import SlotMemory
from engine.core.llm_engine import LLMEngine
from tests.part04.conftest import alone, model, tokenizer  # noqa: F401
from tests.part06.conftest import fake_engine, passed, pytest_runtest_makereport, real_engine  # noqa: F401


@pytest.fixture
def slot_engine(real_engine, model):  # noqa: F811
    """slot_engine(make_scheduler, num_slots, **options) -> an LLMEngine over the trained model."""

    def make(make_scheduler, num_slots: int, **options) -> LLMEngine:
        return real_engine(make_scheduler, SlotMemory(model.config, num_slots), **options)

    return make
