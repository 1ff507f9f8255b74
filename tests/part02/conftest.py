"""A tokenizer whose tokens are single bytes."""

import pytest

from engine.text.tokenizer import AddedToken, Tokenizer
from engine.text.vocabulary import byte_alphabet


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    """Token id = byte; 256 is `<end>`, special, and 257 is `<tool>`, which is not."""
    vocab = {char: byte for byte, char in byte_alphabet().items()}
    added = [AddedToken(256, "<end>"), AddedToken(257, "<tool>", special=False)]
    return Tokenizer(vocab, [], added, eos_token="<end>")
