"""Known-wrong solutions: what each part's tests must reject, and the words in which they do.

`mistakes.toml` in a part's folder lists them: for an exercise, a piece of its solution, and what a learner
may write in its place. `judge` makes the change in a solved tree, runs the exercise's test files in the order
of the manifest, which is that of a learner's run, up to the first failure, which is the one that a learner is
shown (pytest_plugin.py), and demands that it says what is wrong, in few lines. The file is part of no cut
tree, since it holds pieces of the solutions.

The lines counted are those that pytest marks with `E`: the assertion's words and its difference, without the
source around them.
"""

import ast
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from parts.manifest import Part, SeriesError, read_toml, record
from parts.stubs import find_function
from parts.tree import start
from parts.warm import Failure, Warm

PER_EXERCISE = 4  # at least
LINES = 20  # of a failure, at most
SECONDS = 120  # for a wrong solution that does not end


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
    test: str  # the first that failed; empty: none did
    says: str  # its E-lines
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
        raise SeriesError(f"{path} is missing: it lists what the part's tests must reject")
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
    """Make the mistake in the solved `tree`, see what the exercise's tests say, and undo it."""
    (exercise,) = (exercise for exercise in part.exercises if exercise.where == mistake.exercise)
    path, solution = tree / exercise.path, Path(f"{tree}.solution")
    try:
        wrong = make(mistake, path.read_text(encoding="utf-8"))
    except SeriesError as error:
        return Verdict(mistake, "", "", str(error))
    path.replace(solution)
    try:
        _forget(path)
        path.write_text(wrong, encoding="utf-8")
        run = warm.pytest(tree, [*exercise.tests, "-x", "-q", "--tb=short"], SECONDS)
    finally:
        solution.replace(path)
        _forget(path)
    if run.problem:
        return Verdict(mistake, "", "", run.problem)
    if not run.failures:
        return Verdict(mistake, "", "", f"no test of {', '.join(exercise.tests)} rejects it")
    failure = run.failures[0]
    says = essence(failure.report)
    return Verdict(mistake, failure.test, says, _problem(mistake, failure, says))


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
