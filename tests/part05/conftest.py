"""Part 4's fixtures: the trained model, and what it says alone."""

from tests.part04.conftest import alone, model, tokenizer  # noqa: F401
