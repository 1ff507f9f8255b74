"""The cost log: a CSV file with one line per request, with the request's usage and cost. Part 19.

Promises that a request's line is in the file as soon as the request has ended, and that the nanoseconds of
all lines add up to the bill once the log is closed, unless a line could not be written.

The log appends to the lines of earlier runs and keeps the file open. A tool that rotates the file must
therefore copy and truncate it, as logrotate does with copytruncate. The engine's thread writes the lines. A
line that cannot be written whole is left out and reported in the server's log; the engine goes on. Only one
process may write to a log.
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
    "ended",  # time in UTC
    "request_id",  # empty on a line for time that no request pays for
    "reason",  # finish reason; on a line without a request, the kind of time
    *(f"{kind}_tokens" for kind in PAID_KINDS),
    *(f"{kind}_ns" for kind in PAID_KINDS),
    "ns",  # the device's time in all; the lines add up to the bill
    "dollars",
    "api_dollars",  # what the tokens would cost at `api_price`; empty if there is none
)
DECIMALS = 12  # of dollars: at $3.60 an hour, a nanosecond costs $0.000000000001


class CostLog:
    """An open cost log."""

    def __init__(self, path: str | Path, price: Price, api_price: ApiPrice | None = None) -> None:
        """Open the file at `path` to append, and write the header if the file is new.

        `api_price`: prices for comparison, if any. Raises ValueError if the file cannot be opened or written,
        or if its first line is not this header.
        """
        self.price, self.api_price = price, api_price
        header = _csv_line(COLUMNS)
        try:
            # Open until `close`. Without a buffer, a line is in the file as soon as it is written.
            self._file = open(path, "ab+", buffering=0)  # noqa: SIM115
            self._file.seek(0)
            beginning = self._file.read(2 * len(header))  # enough to compare the first line with the header
            if not beginning:
                self._append(header)
            elif beginning.splitlines()[0] != header.rstrip():
                self._file.close()
                message = f"cost_log={str(path)!r}: the file is no cost log; its first line is another"
                raise ValueError(message)
            elif not self._ends_a_line():  # the last writer was stopped in the middle of a line
                self._append(b"\n")
        except OSError as error:
            raise ValueError(f"cost_log={str(path)!r}: {error.strerror or error}") from error

    def _ends_a_line(self) -> bool:
        """Whether the file's last character is a line break."""
        self._file.seek(-1, os.SEEK_END)
        return self._file.read(1) == b"\n"

    def add(self, account: Account) -> None:
        """Write the line of a request. An error is logged and not raised."""
        api_dollars = None if self.api_price is None else self.api_price.of(account.tokens)
        self._write_line(
            request_id=account.request_id,
            reason=account.reason or "unfinished",
            tokens=account.tokens,
            ns=account.ns,
            total_ns=account.total_ns,
            api_dollars=api_dollars,
        )

    def close(self, bill: Bill, unfinished: Iterable[Account] = ()) -> None:
        """Write the last lines and close the file.

        The last lines are those of the `unfinished` requests, and one line for each kind of time in `bill`
        that no request pays for.
        """
        for account in unfinished:
            self.add(account)
        zeros = dict.fromkeys(PAID_KINDS, 0)
        for kind in UNPAID_KINDS:
            if bill.ns[kind]:
                self._write_line(reason=kind, tokens=zeros, ns=zeros, total_ns=bill.ns[kind])
        self._file.close()

    def _write_line(
        self,
        *,
        request_id: str = "",
        reason: str,
        tokens: Mapping[str, int],
        ns: Mapping[str, int],
        total_ns: int,
        api_dollars: Fraction | None = None,
    ) -> None:
        """Write one line. The arguments are its cells, as COLUMNS says; `tokens` and `ns` are by kind
        (PAID_KINDS). An error is logged, and the line is left out.
        """
        cells = [
            datetime.now(UTC).isoformat(timespec="milliseconds"),
            request_id,
            reason,
            *(tokens[kind] for kind in PAID_KINDS),
            *(ns[kind] for kind in PAID_KINDS),
            total_ns,
            _decimal(self.price.of(total_ns)),
            "" if api_dollars is None else _decimal(api_dollars),
        ]
        try:
            self._append(_csv_line(cells))
        except OSError as error:
            logger.error("cost log: a line is lost: %s", error.strerror or error)
        except ValueError as error:  # a step ended after `close`
            logger.error("cost log: a line is lost: %s", error)

    def _append(self, line: bytes) -> None:
        """Write all of `line`, or nothing: half a line would corrupt the next line.

        Raises OSError if the line cannot be written whole.
        """
        num_written = self._file.write(line)
        if num_written < len(line):  # the disk has become full in the middle of the line
            file_size = os.fstat(self._file.fileno()).st_size
            self._file.truncate(file_size - num_written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _csv_line(cells: Iterable[object]) -> bytes:
    """One line of CSV, with its line break."""
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue().encode()


def _decimal(dollars: Fraction) -> str:
    """The amount as a decimal number, rounded to DECIMALS."""
    return f"{float(dollars):.{DECIMALS}f}"
