"""The fixtures of Part 6: the trained model and the fake one, and engines that must end empty."""

from tests.part04.conftest import alone, model, tokenizer  # noqa: F401
from tests.part06.conftest import passed, pytest_runtest_makereport  # noqa: F401
