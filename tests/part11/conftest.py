"""The fixtures of Part 6, and an engine that is listened to."""

import pytest

from engine.telemetry.metrics import EngineMetrics
from tests.part06.conftest import fake_engine, passed, pytest_runtest_makereport  # noqa: F401
from tests.part11.reading import Reading


@pytest.fixture
def measured(fake_engine):  # noqa: F811
    """measured(**options of fake_engine) -> (an LLMEngine over the fake model, its metrics, a reader of
    them).
    """

    def make(*args, **options):
        engine = fake_engine(*args, **options)
        metrics = EngineMetrics(engine, "fake")
        return engine, metrics, Reading(metrics.registry)

    return make
