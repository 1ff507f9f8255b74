"""The file of a trace: a JSON array in Chrome's trace event format, one event on each line. Part 11.

Promises that the thread which writes events never waits for the disk: events are collected in memory, and a
thread of this module writes them every FLUSH_SECONDS. A program that is killed leaves a file without its last
events and without the closing bracket, which Perfetto and chrome://tracing read all the same. A disk that
fails ends the trace with a line in the log, and nothing else. Knows no event's meaning.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import logging
import os
import threading
from pathlib import Path

logger = logging.getLogger(__name__)
MAX_BYTES = 2**28  # of a trace; a browser that shows a much larger one runs out of memory
FLUSH_SECONDS = 0.25  # how often events are written; a program that is killed loses those since the last time
CLOSE_SECONDS = 5  # how long `close` waits for a disk that does not answer
SEPARATOR = ",\n"


class TraceFile:
    """A file that takes events. One thread at a time calls `write` and `end`; any thread may call `close`."""

    def __init__(self, path: str | Path, first: str, max_bytes: int = MAX_BYTES) -> None:
        """Open `path`, overwrite an existing file, and write its first event. Raises OSError if that fails.

        `max_bytes`: from this size on, `is_full` is true, and whoever writes should end the trace.
        """
        self.path, self.max_bytes = Path(path), max_bytes
        self.is_open = True  # whether events are taken: not after `end`, and not after the disk has failed
        self.num_bytes = 0  # of all events so far, those in memory included
        self._pieces: list[str] = []  # not written to the file yet; a piece is one event or several
        self._ending = threading.Event()
        self._process_id = os.getpid()
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115
        try:
            self._write_all(f"[\n{first}")
        except OSError:
            self._file.close()
            raise
        self._thread = threading.Thread(target=self._write_often, name="trace", daemon=True)
        self._thread.start()

    @property
    def is_full(self) -> bool:
        """Whether the events so far have `max_bytes` bytes or more."""
        return self.num_bytes >= self.max_bytes

    def write(self, events: list[str]) -> None:
        """Add events, each as JSON in ASCII without a line feed. After `end`, or once the disk has failed,
        they are dropped.
        """
        if self.is_open and events:
            piece = SEPARATOR.join(events)
            self._pieces.append(piece)
            self.num_bytes += len(piece) + len(SEPARATOR)

    def end(self) -> None:
        """Take no further event. This file's thread writes those that are left, and the closing bracket."""
        self.is_open = False
        self._ending.set()

    def close(self) -> None:
        """End the file, and wait until it is written. In a fork of the process that opened it, do nothing."""
        if os.getpid() != self._process_id:
            return
        self.end()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            logger.error("trace=%r: its disk has not answered in %d s", str(self.path), CLOSE_SECONDS)

    # From here on, everything runs in the thread of this file, but for the first event.

    def _write_often(self) -> None:
        """Write the events that wait, again and again until `end`, and then the closing bracket."""
        try:
            with self._file:
                while not self._ending.wait(FLUSH_SECONDS):
                    self._write_all(self._take_pieces())
                self._write_all(self._take_pieces() + "\n]\n")
        except OSError as error:
            self.is_open = False
            self._pieces.clear()
            logger.error("trace=%r ends here: %s", str(self.path), error.strerror or error)

    def _take_pieces(self) -> str:
        """The events that wait, as they stand in the file."""
        pieces = self._pieces[:]
        del self._pieces[: len(pieces)]  # what `write` appends meanwhile stays
        return "".join(f"{SEPARATOR}{piece}" for piece in pieces)

    def _write_all(self, text: str) -> None:
        """Write all of `text`: one call of `write` may take a part only. Raises OSError."""
        data = text.encode()
        while data:
            num_written = self._file.write(data)
            data = data[num_written:]
