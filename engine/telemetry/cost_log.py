"""A line per request in a CSV file: what it used, and what it cost. Part 19.

Promises that a line is in the file as soon as its request has ended, and that once the log is closed the
lines' nanoseconds add up to the bill. Lines are appended, also to those of an earlier run, and never rotated:
whoever rotates the file copies and truncates it (logrotate's copytruncate). The lines are written by the
engine's thread; one that cannot be written is reported in the server's log and left out, and the engine
goes on. A log belongs to one process.
"""

import csv
import logging
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path

from engine.telemetry.bill import PAID, UNPAID, ApiPrice, Bill, Price
from engine.telemetry.cost import Account

logger = logging.getLogger(__name__)
COLUMNS = (
    "ended",  # UTC
    "request_id",  # empty on a line of what no request pays for
    "reason",  # why it ended; on those lines, what the time went to
    *(f"{kind}_tokens" for kind in PAID),
    *(f"{kind}_ns" for kind in PAID),
    "ns",  # of the device's time, in all: these add up
    "dollars",
    "api_dollars",  # what the tokens would cost at the price given for comparison; empty without one
)
PLACES = 12  # behind the point of dollars: a trillionth


class CostLog:
    """The open file."""

    def __init__(self, path: str | Path, price: Price, api_price: ApiPrice | None = None) -> None:
        """Raises ValueError: it cannot be opened, or what stands in it is something else."""
        self.price, self.api_price = price, api_price
        try:
            self._file = open(path, "a+", newline="", encoding="utf-8")  # noqa: SIM115
            self._file.seek(0)
            header = self._file.readline()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cost_log={str(path)!r}: {getattr(error, 'strerror', error)}") from error
        if header and header.rstrip("\r\n") != ",".join(COLUMNS):
            self._file.close()
            raise ValueError(f"cost_log={str(path)!r}: the file is no cost log; its first line is another")
        self._lines = csv.writer(self._file, lineterminator="\n")
        if not header:
            self._write(COLUMNS)

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
        """Lines of whoever has not ended, and of what no request pays for; then the file is closed."""
        for account in unfinished:
            self.add(account)
        for kind in UNPAID:
            if bill.ns[kind]:
                self._line("", kind, dict.fromkeys(PAID, 0), dict.fromkeys(PAID, 0), bill.ns[kind], None)
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
                *(tokens[kind] for kind in PAID),
                *(ns[kind] for kind in PAID),
                total_ns,
                _decimal(self.price.of(total_ns)),
                "" if api is None else _decimal(api),
            ]
        )

    def _write(self, cells: Iterable[object]) -> None:
        try:
            self._lines.writerow(cells)
            self._file.flush()
        except OSError as error:
            logger.error("cost log: a line is lost: %s", error.strerror)


def _decimal(dollars: Fraction) -> str:
    return f"{float(dollars):.{PLACES}f}"
