"""The lines of a recording, read and written, and the command's refusal of a wrong one."""

import io
import json
from contextlib import redirect_stderr
from pathlib import Path

import pytest

from engine.cli.replay import replay as command

LILY = "Once upon a time, there was a little girl named Lily. She had a"
PROMPTS = [LILY, "The cat", "Once upon a time, there " * 20]


def lines_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def write(file: Path, lines: list[dict | str]) -> Path:
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return file


def about(**args) -> dict:
    """A first line."""
    return {"about": {"args": {"model": "storyteller", "device": "cpu"} | args}}


def batches(lines: list[dict]) -> list[dict]:
    return [line["batch"] for line in lines if "batch" in line]


def refused(file: Path) -> str:
    """What the command says, in one line, as it ends with the status for a file that cannot be run."""
    stderr = io.StringIO()
    with pytest.raises(SystemExit) as exited, redirect_stderr(stderr):
        command(file)
    assert exited.value.code == 2
    said = stderr.getvalue().removesuffix("\n")
    assert said.startswith("ruvon replay: ")
    assert said.isprintable()
    return said
