"""Files that are there and cannot be read: a CheckpointError in the system's own words, never a traceback."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from engine.checkpoint import ZOO, CheckpointError
from engine.config import ModelConfig
from engine.models.loader import load_model
from engine.tokenizer import Tokenizer


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(ZOO / "storyteller-draft", tmp_path / "model"))


def refused(reads, folder) -> str:
    with pytest.raises(CheckpointError) as caught:
        reads(folder)
    return str(caught.value)


READERS = {
    "config.json": ModelConfig.from_pretrained,
    "tokenizer.json": Tokenizer.from_pretrained,
    "tokenizer_config.json": Tokenizer.from_pretrained,
    "model.safetensors": load_model,
}


@pytest.mark.parametrize("file", READERS)
def test_a_folder_in_a_files_place_is_named(folder, file):
    (folder / file).unlink()
    (folder / file).mkdir()
    said = refused(READERS[file], folder)
    assert file in said or "no weights" in said
    assert "\n" not in said


@pytest.mark.parametrize("file", READERS)
def test_a_file_without_permission_is_named_with_that_reason(folder, file, monkeypatch):
    """Whoever runs the tests may be root, whom no permission stops: so the system's answer is put there."""
    really = Path.open

    def forbidden(path, *arguments, **named):
        if path.name == file:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return really(path, *arguments, **named)

    monkeypatch.setattr(Path, "open", forbidden)
    assert refused(READERS[file], folder) == f"{folder / file}: Permission denied"


def test_a_folder_without_permission_is_named(folder, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert refused(ModelConfig.from_pretrained, folder) == f"{folder}: not readable by this user"


def test_a_name_too_long_for_the_system_is_refused():
    assert "too long" in refused(ModelConfig.from_pretrained, Path("a" * 5000))


def test_a_file_that_is_no_utf_8_is_named(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "merges.txt").write_bytes("ü b\n".encode("latin-1"))
    assert refused(Tokenizer.from_pretrained, folder).startswith(f"{folder / 'merges.txt'}: not UTF-8 (")


def test_merges_that_are_missing_are_named(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "merges.txt").unlink(missing_ok=True)
    assert "merges.txt: no such file" in refused(Tokenizer.from_pretrained, folder)
