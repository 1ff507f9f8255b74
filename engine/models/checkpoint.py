"""Finds a model's files: of an embedded model, in a local folder, or on the Hugging Face hub.

Promises a local folder with the files, or a `CheckpointError` that says which file was looked for and where.
Does not know the contents of the files. Part 1.
"""

import json
import os
import stat
from difflib import get_close_matches
from pathlib import Path

ZOO = Path(__file__).parents[1] / "zoo"
MAX_FILE_BYTES = 1 << 28  # of a file of settings or a vocabulary; the largest known one has 40 million bytes
GGUF = ".gguf"
NO_GGUF = "the format GGUF is not read; take the model's folder with config.json and safetensors"
SMALL_FILES = ["*.json", "*.txt", "*.jinja"]  # all files but the weights: settings, vocabularies, templates


class CheckpointError(Exception):
    """A file of a checkpoint is missing, damaged, or not what the model needs. The message says which file,
    setting or tensor.
    """


def embedded_models() -> list[str]:
    """The names of the models inside this package, sorted: the folders of `engine/zoo`."""
    return sorted(path.parent.name for path in ZOO.glob("*/config.json"))


def resolve(name: str | Path, weights: bool = False) -> Path:
    """The local folder of model `name`: an embedded model's name, a folder, or a hub id "owner/name".

    An embedded name takes precedence over a folder of the same name: write `./storyteller` for the folder.
    The files of a hub id are downloaded into the Hugging Face cache. With `weights`, the weights are
    downloaded, too: safetensors if the model has them, else pytorch_model.bin.

    Raises CheckpointError if the name is empty or that of a GGUF file, if there is no such folder, if this
    user may not read it or it has no other model than a GGUF file, or if the hub could not provide the files.
    """
    if not str(name).strip():  # as a path it would be the current folder
        raise CheckpointError(
            f"model {str(name)!r}: an embedded model's name, a folder or a hub id is accepted"
        )
    if str(name) in embedded_models():
        return ZOO / str(name)
    if str(name).lower().endswith(GGUF):
        raise CheckpointError(f"{name}: {NO_GGUF}")
    folder = Path(os.path.expanduser(name))  # Path.expanduser would raise an error for "~nobody/x"
    try:
        if folder.is_dir():
            _refuse_unusable(folder)
            return folder
    except OSError as error:
        raise CheckpointError(f"{folder}: {error.strerror}") from None
    is_path = isinstance(name, Path) or str(name).startswith((".", "/", "~")) or str(name).count("/") > 1
    if is_path:  # `name` cannot be a hub id, which is "owner/name"
        if folder.is_file():
            raise CheckpointError(f"{name} is a file: give the folder that it is in")
        raise CheckpointError(f"no model folder at {name}")
    return _from_hub(str(name), weights)


def _refuse_unusable(folder: Path) -> None:
    """Raises CheckpointError if this user may not read the folder, or if it has a model only as GGUF."""
    if not os.access(folder, os.R_OK | os.X_OK):
        raise CheckpointError(f"{folder}: not readable by this user")
    gguf = sorted(folder.glob(f"*{GGUF}"))
    if gguf and not (folder / "config.json").exists():
        raise CheckpointError(f"{gguf[0]}: {NO_GGUF}")


def _from_hub(repo_id: str, weights: bool) -> Path:
    """Download a model, and return its folder in the Hugging Face cache.

    Raises CheckpointError if the hub does not provide the model.
    """
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(repo_id, allow_patterns=SMALL_FILES))
        if weights:
            snapshot_download(repo_id, allow_patterns=["*.safetensors"])
            if not any(folder.glob("*.safetensors")):
                snapshot_download(repo_id, allow_patterns=["pytorch_model*.bin"])
    except Exception as error:  # the hub's client raises many kinds: offline, unknown id, gated, disk full
        similar = get_close_matches(repo_id, embedded_models(), n=1)
        hint = f"; did you mean {similar[0]!r}?" if similar else ""
        raise CheckpointError(
            f"model {repo_id!r} is neither an embedded model ({', '.join(embedded_models())}) nor a "
            f"folder, and the Hugging Face hub did not provide it: {_hub_error_text(error)}{hint}"
        ) from error
    return folder


def _hub_error_text(error: Exception) -> str:
    """Why the hub did not provide a model. For a known error, the text says what the user can do. For any
    other error, it is the first line of the error's message.
    """
    from huggingface_hub import errors

    cause = error.__cause__
    if isinstance(cause, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, and it was not downloaded before"
    if isinstance(error, errors.LocalEntryNotFoundError) and not isinstance(cause, errors.HfHubHTTPError):
        return f"no network? It was not reached ({cause or error!r:.100}), and nothing was downloaded before"
    if isinstance(error, errors.GatedRepoError):
        return "its makers want to be asked first: do so on its page there, and log in (hf auth login)"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "it has no such model, or a private one (hf auth login)"
    return f"{type(error).__name__}: {first_line(error).rstrip('.')}"


def first_line(error: Exception) -> str:
    """The first line of an error's message; "" without a message."""
    lines = str(error).splitlines()
    return lines[0] if lines else ""


def read_text(path: Path) -> str:
    """Read a UTF-8 text file.

    Raises CheckpointError, which names the file, if the file cannot be read, is not UTF-8, is no regular file
    (a folder, or a pipe, which may never end), or has more than MAX_FILE_BYTES.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path}: not a regular file")
        if status.st_size > MAX_FILE_BYTES:
            raise CheckpointError(
                f"{path}: {status.st_size:,} bytes; at most {MAX_FILE_BYTES:,} are accepted"
            )
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except OSError as error:  # for example, no permission
        raise CheckpointError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8 ({error})") from None


def read_json(path: Path) -> dict:
    """Read a JSON file that holds one object.

    Raises CheckpointError, which names the file, as `read_text` does, or if the content is no JSON object.
    """
    try:
        content = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a JSON file ({error})") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(content).__name__}, not an object")
    return content
