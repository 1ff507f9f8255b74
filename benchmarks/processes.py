"""Processes that take turns: who waits is stopped, and whoever was started is ended with all it started."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

END_SECONDS = 20  # to end by itself, before it is killed
LEFT_SECONDS = 2  # for children that outlive it; those that nobody waits for stay in the group as zombies


class Racer:
    """A process and its children, in a group of their own. Stopped between two `turn`s, so that no thread of
    one that waits takes time from whoever runs.
    """

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], log: Path, cwd: Path | None = None
    ) -> None:
        """Start `command`. Its stderr goes to `log`; stdin and stdout are pipes."""
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command, env=dict(env), cwd=cwd, text=True, start_new_session=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file,
            )  # fmt: skip

    def __enter__(self) -> "Racer":
        """Its turn begins."""
        self._signal(signal.SIGCONT)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Its turn ends."""
        self._signal(signal.SIGSTOP)

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Send a line of JSON, and return the next one that comes."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """The next line of JSON. Raises RuntimeError, with the end of the log, if the process has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args!r} ended:\n{self.log.read_text()[-4000:]}")
        return json.loads(line)

    def end(self) -> None:
        """End the process and all that it started, also if they are stopped."""
        self._signal(signal.SIGCONT)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self._signal(signal.SIGTERM)
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        deadline = time.monotonic() + LEFT_SECONDS
        while self._signal(0) and time.monotonic() < deadline:  # children that outlive the process
            self.process.poll()
            time.sleep(0.1)
        self._signal(signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()

    def _signal(self, number: int) -> bool:
        """Send a signal to the whole group: whether there was anybody."""
        try:
            os.killpg(self.process.pid, number)
            return True
        except ProcessLookupError:
            return False
