"""The trained model, and engines that must end empty: the fixtures of Part 6."""

from tests.part03.linears import packing_asks_no_stopwatch  # noqa: F401
from tests.part06.conftest import passed, pytest_runtest_makereport  # noqa: F401
