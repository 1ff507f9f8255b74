"""The fixtures of Parts 6 and 7: the trained model and the fake one, and engines that must end empty."""

from tests.part04.conftest import alone, model, tokenizer  # noqa: F401
from tests.part06.conftest import fake_engine, passed, pytest_runtest_makereport, real_engine  # noqa: F401
from tests.part07.conftest import slot_engine  # noqa: F401
