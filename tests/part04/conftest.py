"""The trained model, and what it says when it is asked directly, without a server."""

import pytest

from engine.cache.single import CachedForward
from engine.decoding.greedy import generate
from engine.models.loader import load_model
from engine.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def model(checkpoint):
    return load_model(checkpoint)


@pytest.fixture(scope="session")
def tokenizer(checkpoint) -> Tokenizer:
    return Tokenizer.from_pretrained(checkpoint)


@pytest.fixture(scope="session")
def alone(model, tokenizer):
    """alone(prompt, params) -> CompletionOutput: Part 3's loop, one request and nobody else."""
    known = {}

    def ask(prompt, params):
        key = (prompt if isinstance(prompt, str) else tuple(prompt), repr(params))
        if key not in known:
            known[key] = generate(CachedForward(model), tokenizer, model.config, prompt, params).outputs[0]
        return known[key]

    return ask
