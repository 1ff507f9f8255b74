"""Steps written to a file as they run, and run again from it: a bug report that can be sent. Part 20.

Each line of the file is JSON. The first line says how the engine was made. When a step is submitted, a line
with its record and its runner's name is written; when the engine reads its result, another line with its
tokens or its error. A line for an adapter says which folder was written into which slot. `run_again` runs
the same steps in the same order. This module knows no request. The file contains the prompts, as token ids,
so it is as confidential as they are.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from engine.execution.bounds import Bounds
from engine.execution.runner import Executor
from engine.requests.batch import Batch
from engine.requests.request import error_text
from engine.requests.step import Pending, StepResult
from engine.requests.wire import from_json, to_bytes

MAX_LINE = 2**28  # characters


class Recording:
    """Writes a recording to a file. Each line is flushed at once. The file closes when the process ends."""

    def __init__(self, path: str | Path) -> None:
        """Open `path`, and overwrite an existing file. Raises OSError if that fails."""
        self._file: TextIO = open(path, "w", encoding="utf-8", buffering=1)  # noqa: SIM115
        self._num_steps = 0  # written so far

    def write_about(self, values: Mapping[str, Any]) -> None:
        """Write the first line: how the engine was made."""
        self.write({"about": dict(values)})

    def write(self, line: Mapping[str, Any]) -> None:
        """Write a line. A value that JSON cannot hold is written as text: an option may be a path."""
        self._file.write(json.dumps(line, separators=(",", ":"), default=str) + "\n")

    def write_adapter(self, slot: int, folder: str) -> None:
        """Write that `slot` holds the adapter of `folder` in the steps that follow."""
        self.write({"adapter": slot, "folder": folder})

    def write_step(self, runner: str, batch: Batch) -> int:
        """Write a step's record and its runner's name. Returns the step's number in the file, from 1."""
        self._num_steps += 1
        record = to_bytes(batch).decode()  # JSON already
        self._file.write(f'{{"step":{self._num_steps},"runner":"{runner}","batch":{record}}}\n')
        return self._num_steps

    def write_error(self, number: int, error: Exception) -> None:
        """Write the error of step `number`, in place of its result."""
        self.write({"result": number, "error": error_text(error)})


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A `Pending` step that writes its result to the file when the result is read."""

    pending: Pending
    recording: Recording
    number: int  # in the file

    def result(self) -> StepResult:
        """Wait for the step, and write its tokens or its error."""
        try:
            result = self.pending.result()
        except Exception as error:
            self.recording.write_error(self.number, error)
            raise
        self.recording.write({"result": self.number, "tokens": result.tokens})
        return result


class RecordedExecutor:
    """An executor that has another executor compute its steps, and writes all steps to a file."""

    def __init__(self, executor: Executor, recording: Recording, runner: str) -> None:
        """`runner` is the executor's name in the file."""
        self.executor, self.recording, self.runner = executor, recording, runner

    def submit(self, batch: Batch) -> Pending:
        """Write the record, then submit the step. An error of the submission is written, too."""
        number = self.recording.write_step(self.runner, batch)
        try:
            pending = self.executor.submit(batch)
        except Exception as error:
            self.recording.write_error(number, error)
            raise
        return RecordedStep(pending, self.recording, number)

    def on_lost(self, callback: Callable[[BaseException], None]) -> None:
        """Pass `callback` to the executor inside."""
        self.executor.on_lost(callback)

    def shutdown(self) -> None:
        """Shut down the executor inside."""
        self.executor.shutdown()


@dataclass(frozen=True, slots=True)
class ComparedStep:
    """A recorded step: its result in the recording, and its result when it was run again."""

    number: int  # in the file
    runner: str
    batch: Batch
    tokens: list[list[int]] | None  # [S], as recorded; None if the step failed then, with `error`
    tokens_now: list[list[int]] | None  # [S]; None if the step failed now, with `error_now`
    error: str | None = None
    error_now: str | None = None

    @property
    def is_equal(self) -> bool:
        """Whether the tokens are the same. A step that failed when it was recorded counts as equal."""
        return self.tokens is None or self.tokens == self.tokens_now


class _SubmittedStep(NamedTuple):
    """A step that was submitted again, and whose recorded result has not been read yet."""

    runner: str
    batch: Batch
    pending: Pending | Exception  # the error if the submission failed


def run_again(
    file: TextIO,
    runners: Mapping[str, tuple[Executor, Bounds]],
    write_adapter: Callable[[int, str], None],
) -> Iterator[ComparedStep]:
    """Run the steps of a recording in the order in which they were submitted. Yields the steps whose results
    were read, in the order in which they were read.

    `file` is a recording after its first line. `runners` have executors and bounds by the runners' names in
    the file. `write_adapter(slot, folder)` writes the adapter of a folder into a slot. Raises ValueError,
    with the line's number, for a line that does not belong in a recording or whose record is out of bounds.
    """
    submitted: dict[int, _SubmittedStep] = {}  # by the step's number in the file
    line_number = 1  # the first line was read before
    while line := file.readline(MAX_LINE):
        line_number += 1
        try:
            entry = _read(line)
            if "batch" in entry:
                runner, batch = entry["runner"], from_json(entry["batch"])
                executor, bounds = runners[runner]
                bounds.check(batch)
                submitted[entry["step"]] = _SubmittedStep(runner, batch, _submit(executor, batch))
            elif "adapter" in entry:
                write_adapter(entry["adapter"], entry["folder"])
            else:
                step = submitted.pop(entry["result"])
                _check_result(entry, step.batch)
                yield _compare(entry, step)
        except KeyError as error:
            raise ValueError(f"line {line_number}: nothing is known of {error}") from None
        except (ValueError, TypeError) as error:
            raise ValueError(f"line {line_number}: {error}") from None


def _read(line: str) -> dict[str, Any]:
    """The JSON object in a line. Raises ValueError if there is none, or if the line is too long."""
    if len(line) >= MAX_LINE:
        raise ValueError(f"longer than {MAX_LINE:,} characters")
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg}, character {error.pos}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(entry, dict):
        raise ValueError("neither a step nor an adapter nor a result")
    return entry


def _check_result(entry: Mapping[str, Any], batch: Batch) -> None:
    """Raise ValueError if the entry has neither the step's tokens nor an error."""
    tokens, S = entry.get("tokens"), len(batch.ids)
    if tokens is None and isinstance(entry.get("error"), str):
        return
    if (
        not isinstance(tokens, list)
        or len(tokens) != S
        or not all(isinstance(sequence, list) for sequence in tokens)
    ):
        raise ValueError(f"tokens: a list for each of {S} sequences is expected")


def _submit(executor: Executor, batch: Batch) -> Pending | Exception:
    """Submit a step. Returns the error if the submission fails."""
    try:
        return executor.submit(batch)
    except Exception as error:  # the step may have failed when it was recorded, too
        return error


def _compare(entry: Mapping[str, Any], step: _SubmittedStep) -> ComparedStep:
    """Wait for the step, and put its result beside the one in the file."""
    tokens_now = error_now = None
    if isinstance(step.pending, Exception):
        error_now = error_text(step.pending)
    else:
        try:
            tokens_now = step.pending.result().tokens
        except Exception as error:
            error_now = error_text(error)
    return ComparedStep(
        number=entry["result"],
        runner=step.runner,
        batch=step.batch,
        tokens=entry.get("tokens"),
        tokens_now=tokens_now,
        error=entry.get("error"),
        error_now=error_now,
    )
