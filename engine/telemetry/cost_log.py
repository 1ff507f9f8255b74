"""A line per request in a CSV file: what it used, and what it cost. Part 19.

Promises that a line is in the file as soon as its request has ended, and that once the log is closed the
lines' nanoseconds add up to the bill. Lines are appended, also to those of an earlier run, and never rotated:
a tool that rotates the file must copy and truncate it (logrotate's copytruncate). Lines are written by the
engine's thread; one that cannot be written whole is reported in the server's log and left out, and the engine
goes on. A log belongs to one process.
"""

import csv
import errno
import io
import logging
import os
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path

from engine.telemetry.bill import PAID_KINDS, UNPAID_KINDS, ApiPrice, Bill, Price
from engine.telemetry.cost import Account

logger = logging.getLogger(__name__)
COLUMNS = (
    "ended",  # UTC
    "request_id",  # empty on a line of what no request pays for
    "reason",  # why it ended; on those lines, what the time went to
    *(f"{kind}_tokens" for kind in PAID_KINDS),
    *(f"{kind}_ns" for kind in PAID_KINDS),
    "ns",  # of the device's time, in all: these add up
    "dollars",
    "api_dollars",  # what the tokens would cost at the price given for comparison; empty without one
)
DECIMALS = 12  # of dollars: a nanosecond of a device at $3.60 an hour costs $0.000000000001


class CostLog:
    """The open file."""

    def __init__(self, path: str | Path, price: Price, api_price: ApiPrice | None = None) -> None:
        """Raises ValueError: it cannot be opened or written, or what stands in it is something else."""
        self.price, self.api_price = price, api_price
        header = _csv(COLUMNS)
        try:
            self._file = open(path, "ab+", buffering=0)  # noqa: SIM115
            self._file.seek(0)
            beginning = self._file.read(2 * len(header))  # enough to compare the first line with the header
            if not beginning:
                self._append(header)
            elif beginning.splitlines()[0] != header.rstrip():
                self._file.close()
                message = f"cost_log={str(path)!r}: the file is no cost log; its first line is another"
                raise ValueError(message)
            elif not self._ends_a_line():  # the last writer was cut off
                self._append(b"\n")
        except OSError as error:
            raise ValueError(f"cost_log={str(path)!r}: {error.strerror or error}") from error

    def _ends_a_line(self) -> bool:
        self._file.seek(-1, os.SEEK_END)
        return self._file.read(1) == b"\n"

    def add(self, account: Account) -> None:
        """The line of a request."""
        api = None if self.api_price is None else self.api_price.of(account.tokens)
        self._line(
            account.request_id,
            account.reason or "unfinished",
            account.tokens,
            account.ns,
            account.total_ns,
            api,
        )

    def close(self, bill: Bill, unfinished: Iterable[Account] = ()) -> None:
        """Lines of requests that have not ended, and of what no request pays for; then the file is closed."""
        for account in unfinished:
            self.add(account)
        zeros = dict.fromkeys(PAID_KINDS, 0)
        for kind in UNPAID_KINDS:
            if bill.ns[kind]:
                self._line("", kind, zeros, zeros, bill.ns[kind], None)
        self._file.close()

    def _line(
        self,
        request_id: str,
        reason: str,
        tokens: Mapping[str, int],
        ns: Mapping[str, int],
        total_ns: int,
        api: Fraction | None,
    ) -> None:
        self._write(
            [
                datetime.now(UTC).isoformat(timespec="milliseconds"),
                request_id,
                reason,
                *(tokens[kind] for kind in PAID_KINDS),
                *(ns[kind] for kind in PAID_KINDS),
                total_ns,
                _decimal(self.price.of(total_ns)),
                "" if api is None else _decimal(api),
            ]
        )

    def _write(self, cells: Iterable[object]) -> None:
        try:
            self._append(_csv(cells))
        except (OSError, ValueError) as error:  # ValueError: a step that came back after the log was closed
            logger.error("cost log: a line is lost: %s", getattr(error, "strerror", None) or error)

    def _append(self, line: bytes) -> None:
        """All of it or nothing: half a line would spoil the next. Raises OSError."""
        written = self._file.write(line)
        if written < len(line):
            self._file.truncate(os.fstat(self._file.fileno()).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _csv(cells: Iterable[object]) -> bytes:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue().encode()


def _decimal(dollars: Fraction) -> str:
    return f"{float(dollars):.{DECIMALS}f}"
