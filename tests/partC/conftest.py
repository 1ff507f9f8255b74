"""Engines that are made without measuring, and processes that find Hugging Face's code imported."""

from collections.abc import Iterator

import pytest

from engine.demo import server
from engine.parallel import launch
from tests.part03.linears import packing_asks_no_stopwatch  # noqa: F401
from tests.system import ready


class WithTransformers(ready.Popen):
    libraries = (
        *ready.LIBRARIES, "transformers.generation", "transformers.models.auto.modeling_auto",
        "transformers.models.llama.modeling_llama",
    )  # fmt: skip


@pytest.fixture(scope="module")
def forked() -> Iterator[None]:
    """The ranks and the servers that this process starts."""
    with ready.forking(launch, WithTransformers), ready.forking(server, WithTransformers):
        yield
