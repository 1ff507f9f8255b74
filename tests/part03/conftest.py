"""A small random model for the cache."""

import pytest


@pytest.fixture(scope="session")
def random_model(tmp_path_factory):
    """A random GPT-2 of 64 positions whose greedy choices on [1, 7, 42] are clear."""
    from engine.models.loader import load_model
    from tests.part01 import reference

    theirs = reference.random_gpt2(seed=5)
    return load_model(reference.save(theirs, tmp_path_factory.mktemp("random"))), theirs
