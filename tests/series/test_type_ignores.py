"""mypy has nothing to say, and where a line is kept from it, a comment says why: beside it or right above."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
IGNORE = re.compile(r"# type: ignore(?P<kind>\[[\w, -]+\])?(?P<why>.*)")
MOST = 20  # lines: each is one where a mistake would not be noticed


def ignored(lines: list[str]) -> list[tuple[int, str]]:
    """(line number, what is missing) of each line that mypy is told to leave; "": nothing is."""
    found = []
    for number, line in enumerate(lines, 1):
        if match := IGNORE.search(line):
            above = lines[number - 2].strip() if number > 1 else ""
            is_explained = match["why"].strip().startswith("# ") or above.startswith("# ")
            missing = "" if is_explained and match["kind"] else "a reason" if match["kind"] else "a kind"
            found.append((number, missing))
    return found


def test_few_lines_are_kept_from_mypy_and_each_says_why():
    folders = ("engine", "parts", "tools", "benchmarks")
    files = [path for name in folders for path in sorted((ROOT / name).rglob("*.py"))]
    found = [
        (path.relative_to(ROOT).as_posix(), *each)
        for path in files
        for each in ignored(path.read_text(encoding="utf-8").splitlines())
    ]
    assert [each for each in found if each[2]] == [], "file, line, what is missing"
    assert len(found) <= MOST


@pytest.mark.parametrize(
    ("line", "missing"),
    [
        ("x = 1  # type: ignore[assignment]  # the library has no types", ""),
        ("x = 1  # type: ignore[assignment]", "a reason"),
        ("x = 1  # type: ignore  # the library has no types", "a kind"),
    ],
)
def test_what_is_missing_is_found(line, missing):
    assert ignored(["import x", line]) == [(2, missing)]
    assert ignored(["# mypy does not know it.", line])[0][1] == ("" if "[" in line else "a kind")


def test_mypy_has_nothing_to_say():
    """As `make lint` asks it; here beside other tests, since it takes a minute of one core."""
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stdout + done.stderr
