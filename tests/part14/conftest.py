"""The fixtures of Part 10."""

from tests.part10.conftest import (  # noqa: F401
    fake_engine,
    passed,
    pytest_runtest_makereport,
    scoring_engine,
)
