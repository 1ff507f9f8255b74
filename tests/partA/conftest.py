"""What the tests that start ranks ask for first."""

from collections.abc import Iterator

import numpy as np
import pytest

from engine.parallel import launch
from engine.parallel.orders import step_from
from tests.part03.linears import packing_asks_no_stopwatch  # noqa: F401
from tests.system.ready import forking


@pytest.fixture(scope="session")
def orders_are_read() -> None:
    """A step is read here as other processes will read it: what fails there ends them, and is seen here only
    as a rank that is lost.
    """
    step_from(np.array([1, 1, 1, 1, 0] + [0] * 11))


@pytest.fixture(scope="module")
def forked_ranks() -> Iterator[None]:
    """The ranks that this process starts, and not those of a server, need not import torch for seconds."""
    with forking(launch):
        yield
