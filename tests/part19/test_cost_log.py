"""A line per request, and lines that add up to the bill."""

import csv
import logging
from fractions import Fraction
from pathlib import Path

import pytest

from engine.telemetry.bill import PAID, UNPAID, ApiPrice, Bill, Price
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
    return Bill(PRICE, dict.fromkeys([*PAID, *UNPAID], 0) | ns, dict.fromkeys(PAID, 0), 1)


def rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_a_line_is_in_the_file_as_soon_as_it_is_added(tmp_path):
    log = CostLog(tmp_path / "costs.csv", PRICE, API)
    log.add(account("cmpl-1"))
    (row,) = rows(tmp_path / "costs.csv")
    assert tuple(row) == COLUMNS
    assert (row["request_id"], row["reason"]) == ("cmpl-1", "stop")
    assert [row[f"{kind}_tokens"] for kind in PAID] == ["10", "20", "30"]
    assert [row[f"{kind}_ns"] for kind in PAID] == ["1000", "2000", "3000"]
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
    (tmp_path / "image").write_bytes(b"\xff\xfe\x00")
    for wrong in (tmp_path / "image", tmp_path, tmp_path / "nowhere" / "costs.csv"):
        with pytest.raises(ValueError, match="cost_log="):
            CostLog(wrong, PRICE)


def test_a_line_that_cannot_be_written_is_reported_and_the_engine_goes_on(tmp_path, caplog, monkeypatch):
    log = CostLog(tmp_path / "costs.csv", PRICE)

    class Full:
        def writerow(self, cells):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(log, "_lines", Full())
    with caplog.at_level(logging.ERROR):
        log.add(account("a"))
    assert "cost log: a line is lost: No space left on device" in caplog.text
