"""What the GPU's tests need."""

from tests.part04.conftest import tokenizer  # noqa: F401
