"""Known-wrong solutions: what each part's tests must reject, and the words in which they do.

`mistakes.toml` in a part's folder lists them: for an exercise, a piece of its solution, and what a learner
may write in its place. `judge` makes the change in a solved tree, finds the failure that a learner is shown
under "Look here first" (pytest_plugin.py), which is the first in the order of the part's test files, and
demands that it says what is wrong, in few lines. The file is part of no cut tree, since it holds pieces of
the solutions.

The lines counted are those that pytest marks with `E`: the assertion's words and its difference, without the
source around them.
"""

import ast
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import takewhile
from pathlib import Path

from parts.manifest import Exercise, Part, SeriesError, read_toml, record
from parts.stubs import find_function, stub
from parts.tree import start
from parts.warm import Failure, Warm

PER_EXERCISE = 4  # at least
LINES = 20  # of a failure, at most
SECONDS = 600  # for a wrong solution that does not end
SECONDS_UNWRITTEN = 1800  # for several files of other exercises, on a busy machine
UP_TO_THE_FIRST = ("-x", "-q", "--tb=short")  # options of pytest


@dataclass(frozen=True)
class Mistake:
    """One wrong solution."""

    exercise: str  # as in part.toml
    name: str  # the misconception, in a few words
    replace: str  # stands exactly once in the exercise's function
    says: str  # what the first failure must say
    by: str = field(default="", metadata={"key": "with"})  # without it, the text is left out


@dataclass(frozen=True)
class Verdict:
    """What the tests made of a mistake."""

    mistake: Mistake
    test: str  # the one that a learner is shown; empty: none failed
    says: str  # its E-lines; pytest's last lines, where it did not come to its end
    problem: str  # what is wrong with that; empty: nothing

    def __str__(self) -> str:
        at = f"{self.mistake.exercise}: {self.mistake.name!r}"
        return f"{at}: {self.problem or 'rejected'}\n{self.test}\n{self.says}".strip()


def mistakes_file(root: Path, part: Part) -> Path:
    return root / "parts" / part.name / "mistakes.toml"


def load_mistakes(root: Path, part: Part) -> list[Mistake]:
    """The part's mistakes, in order; SeriesError names file and field, and an exercise with too few."""
    path = mistakes_file(root, part)
    if not path.is_file():
        raise SeriesError(
            f"{path} is missing: it lists what the part's tests must reject, and only the checkout has it"
        )
    raw = read_toml(path)
    if unknown := sorted(set(raw) - {"mistakes"}):
        raise SeriesError(f"{path}: unknown field {unknown[0]!r}; accepted: mistakes")
    found = [
        record(Mistake, entry, f"{path}: mistakes[{i}]") for i, entry in enumerate(raw.get("mistakes", ()))
    ]
    count = {exercise.where: 0 for exercise in part.exercises}
    names = set()
    for i, mistake in enumerate(found):
        if mistake.exercise not in count:
            raise SeriesError(
                f"{path}: mistakes[{i}]: exercise = {mistake.exercise!r}: accepted: {', '.join(count)}"
            )
        if (mistake.exercise, mistake.name) in names:
            raise SeriesError(f"{path}: mistakes[{i}]: name = {mistake.name!r} stands twice for its exercise")
        names.add((mistake.exercise, mistake.name))
        count[mistake.exercise] += 1
    for where, number in count.items():
        if number < PER_EXERCISE:
            raise SeriesError(f"{path}: {where} has {number} mistakes; accepted: {PER_EXERCISE} or more")
    return found


def make(mistake: Mistake, source: str) -> str:
    """`source`, the solved file, with the mistake in it; SeriesError when the text does not allow that."""
    path, _, name = mistake.exercise.partition(":")
    at = f"{mistake.exercise}: mistake {mistake.name!r}"
    node = find_function(source, name, path)
    lines = source.splitlines(keepends=True)
    first, last = node.lineno - 1, node.end_lineno
    function = "".join(lines[first:last])
    if (times := function.count(mistake.replace)) != 1:
        raise SeriesError(f"{at}: the text to replace stands {times} times in {name}; accepted: once")
    function = function.replace(mistake.replace, mistake.by)
    wrong = "".join([*lines[:first], function, *lines[last:]])
    try:
        compile(wrong, path, "exec")
    except SyntaxError as error:
        raise SeriesError(f"{at}: line {error.lineno} of {path} is then no Python: {error.msg}") from error
    if ast.dump(ast.parse(wrong)) == ast.dump(ast.parse(source)):
        raise SeriesError(f"{at}: {path} is then the same program")
    return wrong


def judge(warm: Warm, tree: Path, part: Part, mistake: Mistake) -> Verdict:
    """Make the mistake in the solved `tree`, see what a learner is shown, and undo it."""
    (exercise,) = (exercise for exercise in part.exercises if exercise.where == mistake.exercise)
    try:
        wrong = make(mistake, (tree / exercise.path).read_text(encoding="utf-8"))
    except SeriesError as error:
        return Verdict(mistake, "", "", str(error))
    # 1. The first test of the exercise's own that rejects it. Most often it is in the first file, and the
    # others need not be imported: none calls an exercise meanwhile (tests/series/test_trees.py).
    first, *others = exercise.tests
    with written(tree, exercise.path, wrong):
        run = warm.pytest(tree, [first, *UP_TO_THE_FIRST], SECONDS)
        if others and not (run.problem or run.failures):
            run = warm.pytest(tree, [*others, *UP_TO_THE_FIRST], SECONDS)
    if run.problem:
        return Verdict(mistake, "", run.last_lines, run.problem)
    if not run.failures:
        return Verdict(mistake, "", "", f"no test of {', '.join(exercise.tests)} rejects it")
    failure = run.failures[0]
    # 2. A learner's run takes the files of all exercises: does one of another exercise's fail before?
    before = takewhile(lambda file: file != failure.path, part.test_files)
    earlier = tuple(file for file in before if file not in exercise.tests)
    if earlier and (calling := _calling(warm, tree, part, exercise, earlier)):
        with written(tree, exercise.path, wrong):
            run = warm.pytest(tree, [*calling, *UP_TO_THE_FIRST], SECONDS)
        if run.problem:
            return Verdict(mistake, "", run.last_lines, run.problem)
        failure = run.failures[0] if run.failures else failure
    says = essence(failure.report)
    return Verdict(mistake, failure.test, says, _problem(mistake, failure, says))


@cache
def _calling(
    warm: Warm, tree: Path, part: Part, exercise: Exercise, files: tuple[str, ...]
) -> tuple[str, ...]:
    """Those of `files` whose tests call the exercise: they fail in the solved `tree` once it is not written.
    No mistake in it shows in the others.
    """
    source = (tree / exercise.path).read_text(encoding="utf-8")
    unwritten = stub(source, {exercise.name: part.announcement(exercise)}, exercise.path)
    with written(tree, exercise.path, unwritten):
        run = warm.pytest(tree, [*files, "-q", "--tb=line"], SECONDS_UNWRITTEN, once=True)
    failed = {failure.path for failure in run.failures}
    return files if run.problem else tuple(file for file in files if file in failed)


@contextmanager
def written(tree: Path, file: str, source: str) -> Iterator[None]:
    """`source` in the place of the solution in `file` of `tree`, which comes back in the end."""
    path, solution = tree / file, Path(f"{tree}.solution")
    path.replace(solution)
    try:
        _forget(path)
        path.write_text(source, encoding="utf-8")
        yield
    finally:
        solution.replace(path)
        _forget(path)


def _forget(path: Path) -> None:
    """Remove what Python has compiled `path` to: a mistake may be as long and as old as the solution."""
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def essence(report: str) -> str:
    """What a failing test's report says itself: the lines marked E, or all of a report that has none."""
    lines = report.rstrip().splitlines()
    marked = [line[1:] for line in lines if line.startswith("E ")]
    return "\n".join(line.strip() for line in marked or lines)


def _problem(mistake: Mistake, failure: Failure, says: str) -> str:
    if "::" not in failure.test:
        return f"it breaks the import of {failure.test}, so no test names it"
    if " ".join(mistake.says.split()) not in " ".join(says.split()):
        return f"the first failure does not say {mistake.says!r}"
    if (count := len(says.splitlines())) > LINES:
        return f"the failure has {count} lines; accepted: {LINES}"
    return ""


def judge_part(root: Path, part: Part) -> Iterator[Verdict]:
    """All of a part's mistakes, one after another."""
    mistakes = load_mistakes(root, part)
    with tempfile.TemporaryDirectory() as folder, Warm() as warm:
        start(root, part.number, Path(folder) / "solved", solved=True)
        for mistake in mistakes:
            yield judge(warm, Path(folder) / "solved", part, mistake)
