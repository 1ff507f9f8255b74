"""GPT-2's real vocabulary, and `tokenizers` beside our tokenizer."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import tokenizers

from engine.models.checkpoint import ZOO
from engine.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Pair:
    """One vocabulary, read by both."""

    folder: Path  # with vocab.json and merges.txt
    ours: Tokenizer
    theirs: tokenizers.Tokenizer


@pytest.fixture(scope="session")
def gpt2_files(data, tmp_path_factory) -> Path:
    """A folder with GPT-2's two original files and nothing else."""
    folder = tmp_path_factory.mktemp("gpt2_files")
    shutil.copy(data / "gpt2_vocab.json", folder / "vocab.json")
    shutil.copy(data / "gpt2_merges.txt", folder / "merges.txt")
    return folder


@pytest.fixture(scope="session")
def gpt2_pair(gpt2_files) -> Pair:
    theirs = tokenizers.Tokenizer(
        tokenizers.models.BPE.from_file(str(gpt2_files / "vocab.json"), str(gpt2_files / "merges.txt"))
    )
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs.decoder = tokenizers.decoders.ByteLevel()
    theirs.add_special_tokens(["<|endoftext|>"])
    return Pair(gpt2_files, Tokenizer.from_pretrained(gpt2_files), theirs)


@pytest.fixture(scope="session")
def embedded_pair() -> Pair:
    folder = ZOO / "storyteller"
    theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return Pair(folder, Tokenizer.from_pretrained("storyteller"), theirs)


@pytest.fixture(scope="session", params=["embedded", "gpt2"])
def pair(request) -> Pair:
    """Each vocabulary in turn."""
    return request.getfixturevalue(f"{request.param}_pair")
