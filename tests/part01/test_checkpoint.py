"""Where a model's files are found, and what is said when they are not."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from engine.models.checkpoint import SMALL_FILES, ZOO, CheckpointError, embedded_models, read_json, resolve


def test_both_embedded_models_are_found_by_scanning():
    assert {"storyteller", "storyteller-draft"} <= set(embedded_models())
    assert resolve("storyteller") == ZOO / "storyteller"


@pytest.mark.parametrize("weights", [False, True])
def test_a_folder_is_itself(tmp_path, weights):
    assert resolve(tmp_path, weights) == tmp_path
    assert resolve(str(tmp_path), weights) == tmp_path


def test_the_home_folder_may_be_written_as_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert resolve("~/model") == tmp_path / "model"


def test_an_embedded_name_wins_and_a_path_means_the_folder(tmp_path, monkeypatch):
    (tmp_path / "storyteller").mkdir()
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve("storyteller") == ZOO / "storyteller"
    assert resolve("./storyteller").resolve() == tmp_path / "storyteller"
    assert resolve("mine").resolve() == tmp_path / "mine"


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere", "a/b/c", Path("nowhere")])
def test_a_path_without_a_folder_is_named_and_not_looked_up_on_the_hub(name):
    with pytest.raises(CheckpointError, match=r"no model folder at .*(nowhere|a/b/c)"):
        resolve(name)


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name_is_not_the_current_folder(name, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        CheckpointError, match=f"model '{name}': an embedded model's name, a folder or a hub id"
    ):
        resolve(name)
    assert resolve(".") == Path(".")


def test_the_home_of_nobody_is_no_folder():
    with pytest.raises(CheckpointError, match="no model folder at ~nobody-of-this-name/model"):
        resolve("~nobody-of-this-name/model")


@pytest.mark.parametrize("name", ["no-such-model", "nobody/no-such-model"])
def test_an_unknown_name_lists_the_embedded_models(name):
    with pytest.raises(CheckpointError) as caught:
        resolve(name)
    assert repr(name) in str(caught.value)
    assert all(known in str(caught.value) for known in embedded_models())


def response(status: int) -> SimpleNamespace:
    return SimpleNamespace(status_code=status, headers={}, request=None)


@pytest.mark.parametrize(
    ("error", "cause", "words"),
    [
        (
            LocalEntryNotFoundError("Cannot find"),
            OfflineModeIsEnabled("x"),
            "HF_HUB_OFFLINE is set, and it was",
        ),
        (
            LocalEntryNotFoundError("Got: ConnectError: [Errno -2]"),
            ConnectionError("[Errno -2] Name or service not known"),
            r"no network\? It was not reached \(ConnectionError\('\[Errno -2\] Name or service not known'",
        ),
        (GatedRepoError("403", response=response(403)), None, "its makers want to be asked first"),
        (
            RepositoryNotFoundError("404", response=response(404)),
            None,
            "it has no such model, or a private one",
        ),
        (OSError("No space left on device.\nmore"), None, "OSError: No space left on device$"),
    ],
    ids=["offline", "no network", "gated", "unknown", "other"],
)
def test_why_the_hub_did_not_provide_a_model_is_said_so_that_a_user_can_act(monkeypatch, error, cause, words):
    error.__cause__ = cause

    def snapshot_download(*_, **__):
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(CheckpointError, match=f"the Hugging Face hub did not provide it: {words}"):
        resolve("somebody/model")


def test_json_is_read_as_an_object(tmp_path):
    (tmp_path / "a.json").write_text('{"ü": 1}', encoding="utf-8")
    assert read_json(tmp_path / "a.json") == {"ü": 1}


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"null", b'"text"', b'{"a": 1} b', b'{"a": "\xff"}', b"[" * 10**5]
)
def test_a_file_that_holds_no_json_object_is_named(tmp_path, text):
    (tmp_path / "broken.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"broken\.json"):
        read_json(tmp_path / "broken.json")


def test_the_embedded_models_are_complete_for_hugging_face_and_small_enough():
    for name in ("storyteller", "storyteller-draft"):
        files = {path.name: path.stat().st_size for path in (ZOO / name).iterdir()}
        assert set(files) >= {
            *("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
            *("vocab.json", "merges.txt"),
        }
        assert sum(files.values()) <= 16 * 1024 * 1024


def test_copying_an_embedded_folder_is_a_model_of_its_own(tmp_path):
    shutil.copytree(ZOO / "storyteller-draft", tmp_path / "copy")
    assert resolve(tmp_path / "copy", weights=True) == tmp_path / "copy"


def test_the_file_of_weights_is_no_folder_and_the_message_says_which_one_is(tmp_path):
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors is a file: give the folder that it is in$"
    ):
        resolve(str(file))


def test_weights_are_downloaded_only_where_they_are_asked_for(monkeypatch, tmp_path):
    asked = []

    def snapshot_download(repo_id, allow_patterns):
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert resolve("somebody/model") == tmp_path
    assert asked == [SMALL_FILES], "a tokenizer or a config alone needs no gigabytes"
    asked.clear()
    resolve("somebody/model", weights=True)
    assert asked == [SMALL_FILES, ["*.safetensors"], ["pytorch_model*.bin"]], "without these, those"
    (tmp_path / "model.safetensors").touch()
    asked.clear()
    resolve("somebody/model", weights=True)
    assert asked == [SMALL_FILES, ["*.safetensors"]], "one kind is enough"


def test_a_model_in_gguf_is_refused_by_its_files_name_unless_config_json_is_there_too(tmp_path):
    files = [tmp_path / name for name in ("a-Q4.gguf", "b-Q8.gguf")]
    for file in files:
        file.touch()
    for name in (files[1], str(files[1]).upper(), "somebody/model.gguf"):
        with pytest.raises(CheckpointError, match=r"(?i)\.gguf: the format GGUF is not read; take"):
            resolve(name)
    with pytest.raises(CheckpointError, match=r"a-Q4\.gguf: the format GGUF is not read; take"):
        resolve(tmp_path)
    (tmp_path / "config.json").touch()
    assert resolve(tmp_path) == tmp_path, "what is there as GGUF may be there as safetensors, too"
