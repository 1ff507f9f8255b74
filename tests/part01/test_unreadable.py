"""Files that are there and cannot be read: a CheckpointError in the system's own words, never a traceback."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from engine.models.checkpoint import ZOO, CheckpointError
from engine.models.config import ModelConfig
from engine.models.loader import load_model
from engine.text.tokenizer import Tokenizer


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


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_is_no_regular_file_is_refused_unopened(folder, file, kind):
    """A pipe may never answer, and /dev/zero never ends."""
    (folder / file).unlink()
    if kind == "pipe":
        os.mkfifo(folder / file)
    else:
        (folder / file).symlink_to("/dev/zero")
    assert refused(READERS[file], folder) == f"{folder / file}: not a regular file"


def test_weights_in_a_pipe_are_none(folder):
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    assert "no weights" in refused(load_model, folder)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
def test_a_file_of_settings_that_is_too_large_is_refused_unread(folder, file):
    with (folder / file).open("wb") as sparse:
        sparse.truncate(1 << 40)
    words = "1,099,511,627,776 bytes; at most 268,435,456 are accepted"
    assert refused(READERS[file], folder) == f"{folder / file}: {words}"
