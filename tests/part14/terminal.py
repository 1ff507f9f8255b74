"""A chat in a pseudo-terminal of its own: keys go in, and what a reader would see comes out."""

import codecs
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time

import psutil
from rich.cells import cell_len

from tests.part04.serving import DEADLINE, wait_until

CHAT = """
import fcntl, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C reaches us
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore
from rich.console import Console
from engine.client.stream import ChatClient
from engine.client.terminal import TerminalChat
TerminalChat(ChatClient(sys.argv[1]), Console(highlight=False)).run()
"""
CODE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|(.)", re.DOTALL)


class Screen:
    """What was written to a terminal of endless length: rows of cells (character, whether it is dim)."""

    def __init__(self) -> None:
        self.rows: list[list[tuple[str, bool]]] = [[]]
        self._at, self._dim = 0, False

    def feed(self, text: str) -> None:
        for argument, code, one in CODE.findall(text):
            row = self.rows[-1]
            if code == "m":
                self._dim = argument == "2"
            elif code:  # what readline tells the terminal
                pass
            elif one == "\n":
                self.rows.append([])
                self._at = 0
            elif one == "\r":
                self._at = 0
            elif one == "\b":
                self._at = max(0, self._at - 1)
            else:
                cells = cell_len(one)
                row[self._at : self._at + cells] = [(one, self._dim)] + [("", False)] * (cells - 1)
                self._at += cells

    @property
    def lines(self) -> list[str]:
        return ["".join(one for one, _ in row) for row in self.rows]


class Terminal:
    """The chat with the server at `url`, in a window of `columns`."""

    def __init__(self, url: str, columns: int = 80) -> None:
        self.master, slave = pty.openpty()
        self.resize(columns)
        environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHAT, url], stdin=slave, stdout=slave, stderr=slave,
            start_new_session=True, env=environment | {"TERM": "xterm", "INPUTRC": "/dev/null"},
        )  # fmt: skip
        os.close(slave)
        self.came: list[tuple[float, str]] = []  # when, and what
        self.screen = Screen()
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def shows(self, words: str, times: int = 1) -> None:
        """Returns once they are there. A chat that has ended, or a deadline, fails the test."""
        end = time.monotonic() + DEADLINE
        while "\n".join(self.screen.lines).count(words) < times:
            there = time.monotonic() < end and self.read()
            tail = "\n".join(self.screen.lines[-8:])
            assert there, f"{words!r} is not shown {times} times:\n{tail}"

    def waits(self) -> None:
        """Returns once it sleeps at its prompt. Between showing a prompt and waiting for a key, readline
        minds Ctrl-C only with the next key: of 1,500 that were sent as the prompt
        came, on a busy machine, 14 did nothing.
        """
        chat = psutil.Process(self.process.pid)
        wait_until(lambda: chat.status() == psutil.STATUS_SLEEPING)

    def ended(self) -> int:
        """Its exit code."""
        while self.read():
            pass
        return self.process.wait(DEADLINE)

    def read(self, seconds: float = 0.05) -> bool:
        """Take what comes within so many seconds. False: nothing will come any more."""
        if not select.select([self.master], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self.master, 65536)
        except OSError:
            return False
        text = self._decoder.decode(data)  # a character may come in halves
        self.came.append((time.monotonic(), text))
        self.screen.feed(text)
        return bool(data)
