"""The commands of `python -m parts`, also mounted as `ruvon parts`.

Promises: a refusal is a sentence on stderr and exit code 2; `run` and `test` hand on the exit code of what
they ran. Knows nothing of how a tree is cut (tree.py).
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from parts import tree
from parts.manifest import PARTS_PLANNED, Exercise, Number, Part, SeriesError, find_part, load_parts
from parts.mistakes import judge_part
from parts.report import hashes
from parts.stubs import is_written

ROOT = Path(__file__).resolve().parents[1]

app = typer.Typer(help="The series, part by part.", no_args_is_help=True, add_completion=False)
console = Console(highlight=False)

PartNumber = Annotated[str, typer.Argument(metavar="N", help="A part's number, or an extension's letter.")]
Target = Annotated[Path, typer.Argument(metavar="DIR", help="A new or an empty folder.")]
Rest = Annotated[list[str] | None, typer.Argument(metavar="[-- ARGS]", help="Handed on as they are.")]
# Options that are not ours go through even without `--`, which a shell or another tool may have eaten.
HAND_ON = {"ignore_unknown_options": True}
VALUE_IS_A_FILE = ("--deselect", "--ignore", "-c")  # options of pytest


@app.command("list")
def list_parts() -> None:
    """The parts that have landed, in order, and what is coming."""
    with _refusals():
        parts = load_parts(ROOT)
    landed = [part for part in parts if part.landed]
    table = Table(
        "part", "needs", "minutes", "what it brings", box=None, pad_edge=False, padding=(0, 2, 1, 0)
    )
    for part in landed:
        about = f"[bold]{escape(part.title)}[/bold]\n{escape(part.article)}\n{escape(part.capability)}"
        table.add_row(str(part.number), _numbers(part.needs), str(part.minutes), about)
    console.print(table)
    letters = [part.number.label for part in landed if part.number.is_letter]
    count = f"{len(landed) - len(letters)} of {PARTS_PLANNED} parts"
    console.print(f"{' and '.join([count, *letters])} have landed. `python -m parts show N` tells more.")
    for part in parts:
        if not part.landed:
            console.print(f"Coming: {part.number.label}, {part.title}", markup=False)


@app.command()
def show(number: PartNumber) -> None:
    """One part: what it adds, its exercises, its files."""
    with _refusals():
        part = find_part(load_parts(ROOT), number)
        waiting = _unwritten(part)
    console.print(f"[bold]{part.number.label}: {escape(part.title)}[/bold]\n{escape(part.article)}\n")
    console.print(
        f"{part.capability}\n\nAbout {part.minutes} minutes. Needs parts: {_numbers(part.needs)}.\n",
        markup=False,
    )
    console.print("Adds", *part.adds, sep="\n  ", markup=False)
    console.print("\nExercises")
    for exercise in part.exercises:
        state = " (not written yet)" if exercise in waiting else ""
        console.print(Padding(f"{exercise.where}{exercise.stars}{state}", (0, 0, 0, 2)))
        console.print(Padding(exercise.write, (0, 0, 0, 6)))
    console.print(f"\nRead   articles/{part.name}.md")
    console.print(f"Play   notebooks/{part.name}.ipynb, in `python -m parts lab`")
    console.print(f"Write  python -m parts start {part.number} DIR")
    console.print(f"Test   python -m parts test {part.number}\nRun    python -m parts run {part.number}")


@app.command(context_settings=HAND_ON)
def run(number: PartNumber, arguments: Rest = None) -> None:
    """Run a part's demo; what follows `--` goes to it."""
    with _refusals():
        part = find_part(load_parts(ROOT), number)
    _hand_over([str(ROOT / part.demo), *(arguments or [])], cwd=None)


@app.command()
def lab() -> None:
    """Open the notebooks in JupyterLab, with this folder's engine."""
    with _refusals():
        _refuse_without("jupyterlab")
    _hand_over(["-m", "jupyterlab", str(ROOT / "notebooks")], cwd=ROOT)


@app.command("test", context_settings=HAND_ON)
def run_tests(
    number: PartNumber,
    report: Annotated[
        Path | None, typer.Option(help="Write what came out to this JSON file; runs every file.")
    ] = None,
    arguments: Rest = None,
) -> None:
    """Run a part's tests; what follows `--` goes to pytest, and a file among it is run alone."""
    with _refusals():
        part = find_part(load_parts(ROOT), number)
        _refuse_without("pytest")
        waiting = _unwritten(part)
    if waiting:
        console.print(
            f"{len(waiting)} of {len(part.exercises)} exercises are not written yet; red tests are expected:"
        )
        for exercise in waiting:
            console.print(f"  {exercise.where}", markup=False)
    arguments = arguments or []
    tests = [] if _names_a_file(arguments) else [part.tests]
    _hand_over(["-m", "pytest", *tests, *_for_a_report(part, report), *arguments], cwd=ROOT)


@app.command("hash")
def show_hashes(number: PartNumber) -> None:
    """What a report says of engine/ and of a part's tests, of this folder and without running anything."""
    with _refusals():
        part = find_part(load_parts(ROOT), number)
    for name, value in hashes(ROOT, part).items():
        print(name, value)


@app.command()
def mistakes(number: PartNumber) -> None:
    """Make a part's known mistakes, and show which test rejects each, and with what words."""
    with _refusals():
        part = find_part(load_parts(ROOT), number)
        print("| exercise | mistake | rejected by | which says |", "| --- | --- | --- | --- |", sep="\n")
        problems = []
        for verdict in judge_part(ROOT, part):
            mistake = verdict.mistake
            says = mistake.says if not verdict.problem else f"**{verdict.problem}**"
            cells = (f"`{mistake.exercise}`", mistake.name, f"`{verdict.test}`" if verdict.test else "", says)
            print("|", " | ".join(cell.replace("|", "\\|") for cell in cells), "|", flush=True)
            problems += [verdict] if verdict.problem else []
    for verdict in problems:
        print(f"\n{verdict}")
    raise typer.Exit(bool(problems))


@app.command()
def start(
    number: PartNumber,
    target: Target,
    solved: Annotated[bool, typer.Option("--solved", help="With the exercises written.")] = False,
) -> None:
    """Write a project to work in: the engine before part N, and part N with its exercises open."""
    with _refusals():
        part = tree.start(ROOT, number, target, solved)
    state = "solved" if solved else f"{len(part.exercises)} exercises to write"
    where = f"{part.number.label} ({state}) is in {target}"
    console.print(f"{where}. Its README.md says how to go on.", markup=False)
    console.print("It needs no environment of its own. Go there, and use this one:", markup=False)
    console.print(f"  cd {shlex.quote(str(target))}", markup=False, soft_wrap=True)
    console.print(
        f"  {shlex.quote(sys.executable)} -m parts test {part.number}", markup=False, soft_wrap=True
    )


@app.command()
def history(target: Target) -> None:
    """Write a git repository with one commit and one tag per part."""
    with _refusals():
        tags = tree.history(ROOT, target)
    console.print(f"{target}: {', '.join(tags)}. Try `git checkout {tags[0]}` there.", markup=False)


def _numbers(needs: tuple[Number, ...]) -> str:
    return ", ".join(map(str, needs)) or "none"


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except SeriesError as error:
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"Error: {error}", markup=False)
        raise typer.Exit(2) from error


def _names_a_file(arguments: list[str]) -> bool:
    """Whether pytest is told what to collect: FILE or FILE::TEST, and not as the value of an option."""
    options = [None, *arguments]
    return any(
        before not in VALUE_IS_A_FILE and (ROOT / argument.partition("::")[0]).is_file()
        for before, argument in zip(options, arguments, strict=False)
    )


def _for_a_report(part: Part, report: Path | None) -> list[str]:
    """The options of pytest by which parts/report.py writes the file `report`."""
    if report is None:
        return []
    target = report.resolve()
    if target.is_dir() or not target.parent.is_dir():
        with _refusals():
            raise SeriesError(f"--report {report}: accepted is a file in a folder that is there")
    target.unlink(missing_ok=True)  # if the run ends early, an old report must not pass for its own
    cut = tree.read_cut(ROOT)
    every_file = ["--all"] if cut and not cut.solved else []
    return ["-p", "parts.report", f"--report-part={part.number}", f"--report-file={target}", *every_file]


def _unwritten(part: Part) -> list[Exercise]:
    """The exercises that are still as `start` left them."""
    return [e for e in part.exercises if not is_written(ROOT, e.path, e.name)]


def _refuse_without(package: str) -> None:
    """Raise SeriesError if `package` is missing: `make demo` installs nothing for tests and notebooks."""
    if find_spec(package) is None:
        raise SeriesError(
            f"{package} is not installed here; in the checkout, `make .venv/.dev` installs it, or "
            "`pip install -c constraints.txt -e '.[dev]'`"
        )


def _hand_over(arguments: list[str], cwd: Path | None) -> None:
    # The tree's own engine must win over an installed one.
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # No carets in tracebacks: Python 3.11 parses source for them, which two threads cannot do at once.
    env = os.environ | {"PYTHONPATH": path, "PYTHONNODEBUGRANGES": "1"}
    done = subprocess.run([sys.executable, *arguments], env=env, cwd=cwd, check=False)
    raise typer.Exit(done.returncode)
