"""For a learner's test run: a test that meets an open exercise waits, and is not shown among those that fail.

A test waits when it fails with the announcement that `start` left in an exercise; the run is red nonetheless.
Any other failure is shown as usual. Loaded by the conftest.py of a start tree alone.
"""

from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

from parts.manifest import Exercise, find_part, load_parts
from parts.tree import read_cut

ROOT = Path(__file__).resolve().parents[1]
PART = find_part(load_parts(ROOT), read_cut(ROOT).part)


def pytest_report_header() -> str:
    return f"engine: {Path(find_spec('engine').origin).parent}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    text = report.longreprtext + report.caplog  # a server in a thread fails in its log
    if report.failed and (exercise := PART.announced(text)):
        report.longrepr = f"NotImplementedError: {PART.announcement(exercise)}"  # no traceback needed
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report):
    if report.failed and PART.announced(report.longreprtext):
        return "waiting", "w", ("WAITS", {"yellow": True})
    return None


def pytest_terminal_summary(terminalreporter) -> None:
    waiting: dict[Exercise, Counter] = {exercise: Counter() for exercise in PART.exercises}
    for report in terminalreporter.stats.get("waiting", []):
        waiting[PART.announced(report.longreprtext)][report.nodeid.partition("[")[0]] += 1
    count = sum(tests.total() for tests in waiting.values())
    failed = sum(len(terminalreporter.stats.get(kind, [])) for kind in ("failed", "error"))
    terminalreporter.section("exercises")
    for exercise, tests in waiting.items():
        if tests:
            terminalreporter.write_line(f"{exercise.where} - {exercise.write}")
        for test, cases in tests.items():
            terminalreporter.write_line(f"    {test}" + (f" ({cases} cases)" if cases > 1 else ""))
    terminalreporter.write_line(f"{count} tests wait for an exercise, {failed} fail for another reason.")
    if count:
        terminalreporter.write_line("A test shows the first exercise it meets; others may lie behind it.")
    elif not failed:
        terminalreporter.write_line(
            f"All green: see your code at work with `python -m parts run {PART.number}`."
        )
