"""Steps written to a file as they run, and run again from it: a bug report that can be sent. Part 20.

A line of JSON each: how the engine was made; each record when it was submitted, by which runner; the tokens
that came of it, or the error. Promises that what is run again is what ran, in the same order. Knows no
request: a prompt is in the file as token ids, so whoever sends it sends what was said.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from engine.execution.runner import Executor
from engine.requests.batch import NO_ADAPTER, PLACEHOLDER, UNSCORED, Batch
from engine.requests.step import Pending, StepResult
from engine.requests.wire import from_json, to_bytes

MAX_LINE = 2**28  # characters


class Recording:
    """The file. Closed with the process: each line is written out at once."""

    def __init__(self, path: str | Path) -> None:
        """What was in the file is gone. Raises OSError."""
        self._file: TextIO = open(path, "w", encoding="utf-8", buffering=1)  # noqa: SIM115
        self._steps = 0

    def about(self, values: Mapping[str, Any]) -> None:
        """The first line: how the engine was made. What JSON does not know is written as text."""
        self.write({"about": dict(values)})

    def write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":"), default=str) + "\n")

    def adapter(self, slot: int, folder: str) -> None:
        """An adapter, read from `folder`, lies in this slot from here on."""
        self.write({"adapter": slot, "folder": folder})

    def submitted(self, runner: str, batch: Batch) -> int:
        """The step's number."""
        self._steps += 1
        self._file.write(f'{{"step":{self._steps},"runner":"{runner}","batch":{to_bytes(batch).decode()}}}\n')
        return self._steps


@dataclass(frozen=True, slots=True)
class Recorded:
    """A step under way, whose result is written down."""

    pending: Pending
    recording: Recording
    step: int

    def result(self) -> StepResult:
        try:
            result = self.pending.result()
        except Exception as error:
            self.recording.write({"result": self.step, "error": f"{type(error).__name__}: {error}"})
            raise
        self.recording.write({"result": self.step, "tokens": result.tokens})
        return result


class RecordedExecutor:
    """Another executor, all of whose steps are written down."""

    def __init__(self, executor: Executor, recording: Recording, runner: str) -> None:
        """`runner`: what it is called in the file."""
        self.executor, self.recording, self.runner = executor, recording, runner

    def submit(self, batch: Batch) -> Pending:
        step = self.recording.submitted(self.runner, batch)
        try:
            pending = self.executor.submit(batch)
        except Exception as error:
            self.recording.write({"result": step, "error": f"{type(error).__name__}: {error}"})
            raise
        return Recorded(pending, self.recording, step)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What there is on a device: a record that names more would read memory that is not its own."""

    vocab_size: int
    positions: int  # tokens of the longest sequence
    num_blocks: int  # or slots
    block_size: int
    num_swap_blocks: int
    num_adapters: int
    num_seqs: int  # sequences in a step
    num_tokens: int | None  # tokens in a step; None: as many as the sequences may have

    def check(self, batch: Batch) -> None:
        """Raises ValueError, which says what there is not."""
        rows, S, V, ends = batch.rows, len(batch.ids), self.vocab_size, np.array(batch.context_lens)
        table = batch.tables
        # 1. What is looked up somewhere.
        _within("sequences", [S], self.num_seqs + 1)
        _within("tokens", [batch.num_tokens], (self.num_tokens or batch.num_tokens) + 1)
        _within("context_lens", ends, self.positions + 1)
        _within("token_ids", batch.token_ids, V, PLACEHOLDER)
        _within("prompt_ids", rows.prompt_ids, V)
        _within("logprobs", rows.logprobs + rows.prompt_logprobs, V, UNSCORED)
        for row in batch.draws.rows:
            _within("stop_ids", row.stop_ids, V)
            if row.tokens is not None:
                _within("penalties", row.tokens, V)
        _within("adapters", batch.adapters, self.num_adapters, NO_ADAPTER)
        _within("tables", table, self.num_blocks)
        for copy in batch.copies:
            _within("copies", copy.source, self.num_swap_blocks if copy.kind == "in" else self.num_blocks)
            _within("copies", copy.target, self.num_swap_blocks if copy.kind == "out" else self.num_blocks)
        # 2. Blocks for all tokens, and the new ones' places in them.
        P = self.block_size
        if table.shape[1] != -(-ends.max() // P):
            raise ValueError(f"tables: {table.shape[1]} blocks each, for up to {ends.max()} tokens")
        sequence = np.repeat(np.arange(S), np.diff(batch.query_start))
        position = np.array(batch.positions)
        if (batch.slots != table[sequence, position // P] * P + position % P).any():
            raise ValueError("slots: the places of the new tokens in their blocks are expected")


def _within(name: str, values: Sequence[int] | np.ndarray, end: int, start: int = 0) -> None:
    """Raises ValueError: some are not in start..end-1."""
    numbers = np.asarray(values, dtype=np.int64)
    wrong = numbers[(numbers < start) | (numbers >= end)]
    if wrong.size:
        raise ValueError(f"{name}: {wrong[0]}, and there are {end}")


@dataclass(frozen=True, slots=True)
class Compared:
    """A step that was run again."""

    step: int
    runner: str
    batch: Batch
    recorded: list[list[int]] | None  # [S]; None: it failed, with `error`
    again: list[list[int]] | None  # [S]; None: it fails now, with `error_now`
    error: str | None = None
    error_now: str | None = None

    @property
    def is_equal(self) -> bool:
        """The same tokens. A step that failed then says nothing: memory was short, say."""
        return self.recorded is None or self.recorded == self.again


def run_again(
    file: TextIO,
    runners: Mapping[str, tuple[Executor, Bounds]],
    lay_adapter: Callable[[int, str], None],
) -> Iterator[Compared]:
    """Every step of a recording whose result was read, run in the order in which they were submitted.

    `file`: its first line has been read. `runners`: by their names there; `lay_adapter`: reads the adapter of
    a folder into a slot. Raises ValueError: a line that is none of a recording's, with its number.
    """
    under_way: dict[int, tuple[str, Batch, Pending | Exception]] = {}
    number = 1
    while line := file.readline(MAX_LINE):
        number += 1
        try:
            said = _read(line)
            if "batch" in said:
                runner, batch = said["runner"], from_json(said["batch"])
                executor, bounds = runners[runner]
                bounds.check(batch)
                under_way[said["step"]] = runner, batch, _submitted(executor, batch)
            elif "adapter" in said:
                lay_adapter(said["adapter"], said["folder"])
            else:
                runner, batch, pending = under_way.pop(said["result"])
                _check_result(said, batch)
                yield _compared(said, runner, batch, pending)
        except KeyError as error:
            raise ValueError(f"line {number}: nothing is known of {error}") from None
        except (ValueError, TypeError) as error:
            raise ValueError(f"line {number}: {error}") from None


def _read(line: str) -> dict[str, Any]:
    """Raises ValueError."""
    if len(line) >= MAX_LINE:
        raise ValueError(f"longer than {MAX_LINE:,} characters")
    try:
        said = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg}, character {error.pos}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(said, dict):
        raise ValueError("neither a step nor an adapter nor a result")
    return said


def _check_result(said: Mapping[str, Any], batch: Batch) -> None:
    """Raises ValueError: neither the step's tokens nor an error."""
    tokens, S = said.get("tokens"), len(batch.ids)
    if tokens is None and isinstance(said.get("error"), str):
        return
    if (
        not isinstance(tokens, list)
        or len(tokens) != S
        or not all(isinstance(of_one, list) for of_one in tokens)
    ):
        raise ValueError(f"tokens: a list for each of {S} sequences is expected")


def _submitted(executor: Executor, batch: Batch) -> Pending | Exception:
    try:
        return executor.submit(batch)
    except Exception as error:  # it may have failed when it was recorded, too
        return error


def _compared(said: Mapping[str, Any], runner: str, batch: Batch, pending: Pending | Exception) -> Compared:
    again = error_now = None
    try:
        if isinstance(pending, Exception):
            raise pending
        again = pending.result().tokens
    except Exception as error:
        error_now = f"{type(error).__name__}: {error}"
    return Compared(said["result"], runner, batch, said.get("tokens"), again, said.get("error"), error_now)
