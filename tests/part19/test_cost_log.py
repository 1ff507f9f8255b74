"""A line per request, and lines that add up to the bill."""

import csv
import logging
from datetime import datetime
from fractions import Fraction
from pathlib import Path

import pytest

from engine.telemetry.bill import PAID_KINDS, UNPAID_KINDS, ApiPrice, Bill, Price
from engine.telemetry.cost import Account
from engine.telemetry.cost_log import COLUMNS, CostLog

PRICE = Price.parse("3.60")  # a dollar for a thousand seconds
API = ApiPrice.parse("1,10,100")


def account(name: str, reason: str | None = "stop") -> Account:
    return Account(
        name,
        {"cached": 1000, "input": 2000, "output": 3000},
        {"cached": 10, "input": 20, "output": 30},
        reason=reason,
    )


def a_bill(**ns: int) -> Bill:
    return Bill(PRICE, dict.fromkeys([*PAID_KINDS, *UNPAID_KINDS], 0) | ns, dict.fromkeys(PAID_KINDS, 0), 1)


def rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_a_line_is_in_the_file_as_soon_as_it_is_added(tmp_path):
    log = CostLog(tmp_path / "costs.csv", PRICE, API)
    log.add(account("cmpl-1"))
    (row,) = rows(tmp_path / "costs.csv")
    assert tuple(row) == COLUMNS
    assert (row["request_id"], row["reason"]) == ("cmpl-1", "stop")
    assert [row[f"{kind}_tokens"] for kind in PAID_KINDS] == ["10", "20", "30"]
    assert [row[f"{kind}_ns"] for kind in PAID_KINDS] == ["1000", "2000", "3000"]
    assert row["ns"] == "6000"
    assert row["dollars"] == "0.000000006000"
    assert Fraction(row["api_dollars"]) == Fraction(10 + 200 + 3000, 10**6)
    log.close(a_bill())


def test_once_it_is_closed_its_lines_are_the_bill(tmp_path):
    log = CostLog(tmp_path / "costs.csv", PRICE)
    log.add(account("a"))
    bill = a_bill(cached=2000, input=4000, output=6000, idle=77, failed=1)
    log.close(bill, [account("b", None)])
    found = rows(tmp_path / "costs.csv")
    assert [(row["request_id"], row["reason"], int(row["ns"])) for row in found] == [
        ("a", "stop", 6000),
        ("b", "unfinished", 6000),
        ("", "failed", 1),
        ("", "idle", 77),
    ]
    assert sum(int(row["ns"]) for row in found) == bill.total_ns, "the lines add up to the bill"
    assert {row["api_dollars"] for row in found} == {""}, "nobody gave a price to compare with"


def test_a_second_run_appends(tmp_path):
    for name in "ab":
        log = CostLog(tmp_path / "costs.csv", PRICE)
        log.add(account(name))
        log.close(a_bill())
    assert [row["request_id"] for row in rows(tmp_path / "costs.csv")] == ["a", "b"], "one header, two lines"


def test_a_file_that_is_something_else_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("dear diary\n")
    with pytest.raises(ValueError, match=r"cost_log=.*notes.txt.*the file is no cost log"):
        CostLog(tmp_path / "notes.txt", PRICE)
    assert (tmp_path / "notes.txt").read_text() == "dear diary\n"
    (tmp_path / "more.csv").write_text(",".join([*COLUMNS, "more"]) + "\n")
    (tmp_path / "image").write_bytes(b"\xff\xfe\x00")
    for wrong in (tmp_path / "more.csv", tmp_path / "image", tmp_path, tmp_path / "nowhere" / "costs.csv"):
        with pytest.raises(ValueError, match="cost_log="):
            CostLog(wrong, PRICE)


@pytest.mark.parametrize("zeros", [b"\0" * 10**6, b"\n"])
def test_a_file_without_a_first_line_is_no_cost_log(tmp_path, zeros):
    (tmp_path / "disk").write_bytes(zeros)
    with pytest.raises(ValueError, match="the file is no cost log"):
        CostLog(tmp_path / "disk", PRICE)


class Disk:
    """The open file of a log, on a disk with room for so many bytes."""

    def __init__(self, log: CostLog, room: int) -> None:
        self.file, self.room = log._file, room
        log._file = self

    def write(self, line: bytes) -> int:
        if not self.room:
            raise OSError(28, "No space left on device")
        written = self.file.write(line[: self.room])
        self.room -= written
        return written

    def __getattr__(self, name: str):
        return getattr(self.file, name)


@pytest.mark.parametrize("room", [0, 1, 20, 35])
def test_a_line_that_cannot_be_written_is_reported_and_the_engine_goes_on(tmp_path, caplog, room):
    log = CostLog(tmp_path / "costs.csv", PRICE)
    log.add(account("a"))
    disk = Disk(log, room)
    with caplog.at_level(logging.ERROR):
        log.add(account("lost"))
    assert "cost log: a line is lost: No space left on device" in caplog.text
    disk.room = 10**6
    log.add(account("b"))
    log.close(a_bill(idle=1))
    assert [row["request_id"] for row in rows(tmp_path / "costs.csv")] == ["a", "b", ""], (
        "what is lost is lost whole: no half line, and nothing that comes later"
    )
    assert all(datetime.fromisoformat(row["ended"]) for row in rows(tmp_path / "costs.csv"))


def test_a_line_that_was_cut_off_spoils_no_other(tmp_path):
    """The machine went down while a line was written."""
    path = tmp_path / "costs.csv"
    log = CostLog(path, PRICE)
    log.add(account("a"))
    log.close(a_bill())
    path.write_text(path.read_text() + "2026-11-22T07:")
    log = CostLog(path, PRICE)
    log.add(account("b"))
    assert [row["request_id"] for row in rows(path)] == ["a", None, "b"]


def test_a_step_that_comes_back_after_the_log_was_closed_is_said(tmp_path, caplog):
    log = CostLog(tmp_path / "costs.csv", PRICE)
    log.close(a_bill())
    with caplog.at_level(logging.ERROR):
        log.add(account("late"))
    assert "cost log: a line is lost" in caplog.text


def test_a_log_that_ends_with_a_whole_line_is_continued_on_the_next(tmp_path):
    path = tmp_path / "costs.csv"
    for _ in range(2):
        log = CostLog(path, PRICE)
        log.add(account("a"))
        log.close(a_bill())
    assert path.read_text().count("\n") == 3, "a header and two lines: no empty line between two runs"


def test_time_that_no_request_pays_for_has_no_tokens(tmp_path):
    log = CostLog(tmp_path / "costs.csv", PRICE)
    log.close(a_bill(idle=77))
    (row,) = rows(tmp_path / "costs.csv")
    numbers = {row[f"{kind}_{unit}"] for kind in PAID_KINDS for unit in ("tokens", "ns")}
    assert (row["ns"], numbers) == ("77", {"0"}), "idle time is in the total alone"
