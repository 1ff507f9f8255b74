"""The tiny model and its adapters; the fixtures of Part 6."""

import pytest

pytest.importorskip("peft", reason="needs the package peft, which dev brings")

from tests.part06.conftest import passed, pytest_runtest_makereport  # noqa: F401
from tests.part18 import tiny


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    return tiny.base(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def adapters(base, tmp_path_factory):
    """name -> the folder of an adapter that PEFT has saved."""
    root = tmp_path_factory.mktemp("adapters")
    return {name: tiny.save_adapter(base, root / name, **kind) for name, kind in tiny.KINDS.items()}
