"""A test run as a file that a program can read: `python -m parts test N --report FILE`.

Loaded into pytest by that command (`-p parts.report`). Says which exercises are written and done, how many
tests passed, failed, wait for an exercise or were skipped, with which versions, and what was tested: the
hashes of engine/ and of the part's tests. A report proves nothing by itself, since a file can be written by
hand; whoever grades runs the tests again, and compares the hashes (articles/course.md).
"""

import hashlib
import json
import platform
import sys
from collections import Counter
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from parts.manifest import Exercise, Part, find_part, load_parts
from parts.stubs import is_written

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("numpy", "pytest", "torch", "transformers")  # whose versions may change a result
SKIPPED = ("__pycache__", ".pytest_cache", ".hypothesis")


def folder_hash(folder: Path) -> str:
    """SHA-256 of all files below `folder`: their paths, and what is in them. Caches are left out."""
    whole = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        place = path.relative_to(folder)
        if path.is_file() and not set(place.parts) & set(SKIPPED):
            whole.update(f"{place.as_posix()}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return whole.hexdigest()


def hashes(root: Path, part: Part) -> dict[str, str]:
    """What is tested in the tree at `root`, and by what."""
    return {"engine_sha256": folder_hash(root / "engine"), "tests_sha256": folder_hash(root / part.tests)}


class Report:
    """A pytest plugin that counts what the tests of a part say, and writes it down when they have ended."""

    def __init__(self, part: Part, target: Path) -> None:
        self.part, self.target = part, target
        self.outcomes: dict[str, str] = {}  # test id -> passed, failed, waiting or skipped

    def pytest_runtest_logreport(self, report) -> None:
        """A test has up to three reports: it is what the worst of them says."""
        before = self.outcomes.get(report.nodeid)
        if report.failed:
            waits = self.part.announced(f"{report.longreprtext}\n{report.caplog}")
            self.outcomes[report.nodeid] = "waiting" if waits and before != "failed" else "failed"
        elif report.skipped:
            self.outcomes[report.nodeid] = "skipped"
        elif report.when == "call" and before is None:
            self.outcomes[report.nodeid] = "passed"

    def pytest_collectreport(self, report) -> None:
        """A file that cannot be imported, or skips itself, counts as one test."""
        if report.failed or report.skipped:
            self.outcomes[report.nodeid] = "failed" if report.failed else "skipped"

    def pytest_sessionfinish(self, exitstatus) -> None:
        engine = getattr(sys.modules.get("engine"), "__file__", None)
        ours = engine is not None and Path(engine).resolve().parent == ROOT / "engine"
        files = {path.relative_to(ROOT).as_posix() for path in (ROOT / self.part.tests).glob("test_*.py")}
        content = {
            "part": str(self.part.number),
            "title": self.part.title,
            "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "exercises": [self._exercise(exercise) for exercise in self.part.exercises],
            "tests": self._counts(*files)
            | {"complete": files <= self._files(), "exit_code": int(exitstatus)},
            **hashes(ROOT, self.part),
            "engine_is_this_folders": ours,
            "versions": _versions(),
        }
        self.target.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    def _files(self) -> set[str]:
        return {test.partition("::")[0] for test in self.outcomes}

    def _counts(self, *files: str) -> dict[str, int]:
        counted = Counter(word for test, word in self.outcomes.items() if test.partition("::")[0] in files)
        return {word: counted[word] for word in ("passed", "failed", "waiting", "skipped")}

    def _exercise(self, exercise: Exercise) -> dict:
        counts = self._counts(*exercise.tests)
        green = not counts["failed"] and not counts["waiting"] and counts["passed"] > 0
        written = is_written(ROOT, exercise.path, exercise.name)
        return {
            "where": exercise.where,
            "grade": exercise.grade,
            "written": written,
            "done": written and green and set(exercise.tests) <= self._files(),
            **counts,
        }


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def pytest_addoption(parser) -> None:
    parser.addoption("--report-part", help="the part whose tests run")
    parser.addoption("--report-file", help="the file that gets the report")


def pytest_configure(config) -> None:
    is_worker = hasattr(config, "workerinput")  # of xdist, which tells the process that started it
    if config.option.report_file and not is_worker:
        part = find_part(load_parts(ROOT), config.option.report_part)
        config.pluginmanager.register(Report(part, Path(config.option.report_file)), "parts-report")
