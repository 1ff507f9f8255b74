"""Engines that are made without measuring, and ranks that fork from a process with Hugging Face's code."""

from collections.abc import Iterator

import pytest

from tests.part03.linears import packing_asks_no_stopwatch  # noqa: F401
from tests.partA.forked import forking
from tests.system import ready


class Rank(ready.Popen):
    libraries = (
        "torch", "transformers.generation", "transformers.models.auto.modeling_auto",
        "transformers.models.llama.modeling_llama",
    )  # fmt: skip


@pytest.fixture(scope="module")
def forked_ranks() -> Iterator[None]:
    """Ranks that this process starts."""
    with forking(Rank):
        yield
