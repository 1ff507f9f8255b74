"""For a learner's test run: what waits for an exercise, what is wrong, and where to look first.

A test waits when it fails with the announcement that `start` left in an exercise; it is counted with that
exercise (`-v` lists it), and the run is red nonetheless. Any other failure is shown as usual, shortly, and
the first of them once more as the last thing, in its own words. Test files run from small to large
(Part.test_files), and behind one with such a failure no further file is run, unless --all asks for it.
Loaded by the conftest.py of a start tree alone.
"""

import re
import sys
import threading
import tomllib
from collections import Counter
from collections.abc import Generator
from functools import cache, wraps
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from parts.manifest import Exercise, find_part, load_parts
from parts.mistakes import essence
from parts.stubs import is_written
from parts.tree import read_cut

ROOT = Path(__file__).resolve().parents[1]
CUT = read_cut(ROOT)
assert CUT is not None  # the full checkout does not load this
PART = find_part(load_parts(ROOT), CUT.part)
CALLED = pytest.StashKey[set[str]]()  # exercises, by `where`
ORDER = PART.test_files
PLACES = pytest.StashKey[dict[str, int]]()  # a test's id -> which one it is, in the order of the run
FAILED = pytest.StashKey[set[str]]()  # files with a failure that is no exercise's waiting


def pytest_addoption(parser) -> None:
    parser.addoption("--all", action="store_true", help="run every file, also after one that fails")


def pytest_configure(config) -> None:
    config.stash[PLACES], config.stash[FAILED] = {}, set()
    if config.option.tbstyle == "auto":
        config.option.tbstyle = "short"


def pytest_report_header() -> str:
    engine = find_spec("engine")
    return f"engine: {Path(engine.origin).parent if engine and engine.origin else 'not found'}"


def pytest_collection_modifyitems(config, items) -> None:
    """Files that no exercise names first: they are green from the start."""
    items.sort(key=lambda item: ORDER.index(path) if (path := _file(item)) in ORDER else -1)
    config.stash[PLACES].update((item.nodeid, place) for place, item in enumerate(items))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    """After a file with a failure the run ends: later files are larger, and mostly fail of the same."""
    result = yield
    config, file = item.config, _file(item)
    is_last_of_file = nextitem is not None and _file(nextitem) != file
    if is_last_of_file and file in config.stash[FAILED] and not config.option.all:
        item.session.shouldfail = f"later files were not run: `{_command('--all')}` runs them, too"
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Where a file is about several exercises, note which of the written ones the test calls.

    To be told of every call makes a test several times slower: not before there is one to note.
    """
    about = [exercise for exercise in PART.exercises if _file(item) in exercise.tests]
    asked = {(str(ROOT / e.path), e.name): e.where for e in about if _is_written(e)}
    called = item.stash[CALLED] = set()
    if len(about) < 2 or not asked:
        called.update(asked.values())
        return (yield)

    def note(frame, event, _) -> None:
        code = frame.f_code
        if event == "call" and (where := asked.get((code.co_filename, code.co_qualname))):
            called.add(where)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        return (yield)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


class _Waits(BaseException):
    """No error to hypothesis, which would look for the smallest example of one."""


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """A test of hypothesis ends at the first example that meets an exercise to be written."""
    test = getattr(pyfuncitem.obj, "hypothesis", None)
    if test is None:
        return (yield)
    inner = test.inner_test

    @wraps(inner)
    def once(*args, **options):
        try:
            return inner(*args, **options)
        except NotImplementedError as error:
            raise _Waits from error

    test.inner_test = once
    try:
        return (yield)
    except _Waits as met:
        raise met.__cause__ from None
    finally:
        test.inner_test = inner


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    if call.excinfo and PART.announced(f"{call.excinfo.typename}: {call.excinfo.value}"):
        item.repr_failure = lambda excinfo: f"{excinfo.typename}: {excinfo.value}"  # quick: no source is read
    report = yield
    report.called = sorted(item.stash.get(CALLED, ()))
    text = report.longreprtext + report.caplog  # a server in a thread fails in its log
    if report.failed and (exercise := PART.announced(text)):
        report.longrepr = f"NotImplementedError: {PART.announcement(exercise)}"  # no traceback needed
    elif report.failed:
        item.config.stash[FAILED].add(_file(item))
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report):
    if report.failed and PART.announced(report.longreprtext):
        return "waiting", "w", ("WAITS", {"yellow": True})
    return None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter, config) -> Generator[None, object, object]:
    """Behind pytest's own summary, which may be long: what is said last is read first."""
    result = yield
    write, stats = terminalreporter.write_line, terminalreporter.stats
    waiting: dict[Exercise, Counter] = {exercise: Counter() for exercise in PART.exercises}
    for report in stats.get("waiting", []):
        exercise = PART.announced(report.longreprtext)
        assert exercise is not None  # pytest_report_teststatus
        waiting[exercise][report.nodeid.partition("[")[0]] += 1
    count = sum(tests.total() for tests in waiting.values())
    failed = [report for kind in ("error", "failed") for report in stats.get(kind, [])]
    terminalreporter.section("exercises")
    for exercise, tests in waiting.items():
        if tests:
            write(f"{exercise.where} - {exercise.write}: {tests.total()} tests wait")
        for test, cases in tests.items() if config.option.verbose > 0 else ():
            write(f"    {test}" + (f" ({cases} cases)" if cases > 1 else ""))
    write(f"{count} tests wait for an exercise, {len(failed)} fail for another reason.")
    if count:
        write("A test shows the first exercise it meets; others may lie behind it.")
    skipped = _skipped_for_a_package(stats.get("skipped", []))
    for package, (remedy, files) in skipped.items():
        write(f"Not run, since {package} is not installed ({remedy}):")
        for file in sorted(files):
            write(f"    {file}")
    unwritten = [
        exercise.where for exercise in PART.exercises if not waiting[exercise] and not _is_written(exercise)
    ]
    if unwritten and _whole_part(config, terminalreporter):
        write(f"Not written, and no test that ran meets it: {', '.join(unwritten)}.")
    if failed:
        places = config.stash[PLACES]
        _point_out(min(failed, key=lambda report: places.get(report.nodeid, -1)), write)
    elif not count and _whole_part(config, terminalreporter):
        state = "What ran is green" if skipped or unwritten else "All green"
        write(f"{state}: see your code at work with `python -m parts run {PART.number}`.")
    elif not count:
        write(f"These are green. The whole part: `{_command()}`.")
    return result


def _command(*arguments: str) -> str:
    return " ".join(["python -m parts test", str(PART.number), *arguments])


def _skipped_for_a_package(reports: list) -> dict[str, tuple[str, set[str]]]:
    """Of tests that were skipped, and say that they want a package of an extra of pyproject.toml: package ->
    (how to get it, the tests' files).
    """
    found: dict[str, tuple[str, set[str]]] = {}
    for report in reports:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        for package, remedy in _missing_packages().items():
            if re.search(rf"\b{re.escape(package)}\b", reason):
                _, files = found.setdefault(package, (remedy, set()))
                files.add(report.nodeid.partition("::")[0])
    return found


@cache
def _missing_packages() -> dict[str, str]:
    """Packages of an extra of pyproject.toml that are not installed here: name -> how to get it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    missing: dict[str, str] = {}
    for extra, requirements in project.get("optional-dependencies", {}).items():
        for requirement in map(Requirement, requirements):
            if requirement.name == project["name"] or not _is_missing(requirement.name):
                continue
            remedy = f"pip install 'ruvon[{extra}]' brings it"
            if requirement.marker is not None and not requirement.marker.evaluate():
                remedy = f"it needs {requirement.marker}: a container, or WSL on Windows"
            missing.setdefault(requirement.name, remedy)
    return missing


def _is_missing(package: str) -> bool:
    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return True
    return False


def _point_out(report, write) -> None:
    """The first failure: where it is, what it checks, what it says."""
    path = report.nodeid.partition("::")[0]
    written = [
        exercise.where
        for exercise in PART.exercises
        if path in exercise.tests and exercise.where in getattr(report, "called", ())
    ]
    write(f"\nLook here first: {report.nodeid}")
    if written:
        write(f"    It checks {' and '.join(written)}.")
    for line in essence(report.longreprtext).splitlines():
        write(f"    {line}")


@cache
def _is_written(exercise: Exercise) -> bool:
    return is_written(ROOT, exercise.path, exercise.name)


def _whole_part(config, terminalreporter) -> bool:
    """Whether every test of the part ran, not only some that were asked for."""
    ran = {
        report.nodeid.partition("::")[0]
        for kind in ("passed", "skipped", "xfailed")
        for report in terminalreporter.stats.get(kind, [])
    }
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / PART.tests).glob("test_*.py")}
    named = any("::" in argument for argument in config.args)
    return files <= ran and not named and not terminalreporter.stats.get("deselected")


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]
