"""Engines that must end empty, with the fixtures of Part 6, and processes that need not import torch."""

from collections.abc import Iterator

import pytest

from engine.demo import server
from engine.parallel import launch
from tests.part03.linears import packing_asks_no_stopwatch  # noqa: F401
from tests.part06.conftest import passed, pytest_runtest_makereport  # noqa: F401
from tests.system.ready import forking


@pytest.fixture(scope="module")
def forked() -> Iterator[None]:
    """The ranks and the servers that this process starts."""
    with forking(launch), forking(server):
        yield
