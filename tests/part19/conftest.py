"""The fixtures of Part 6, and an engine whose time is metered."""

import pytest

from engine.telemetry.cost import CostMeter
from tests.part06.conftest import fake_engine, passed, pytest_runtest_makereport  # noqa: F401
from tests.part19.metering import DOLLAR_A_SECOND, Loud


@pytest.fixture
def metered(fake_engine):  # noqa: F811
    """metered(weights, **options of fake_engine) -> (an LLMEngine over the fake model, its meter)."""

    def make(*args, weights=None, **options):
        engine = fake_engine(*args, listeners=Loud(), **options)
        meter = CostMeter(DOLLAR_A_SECOND, weights)
        engine.listeners.add(meter)
        return engine, meter

    return make
