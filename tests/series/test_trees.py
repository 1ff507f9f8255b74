"""Every landed part, cut out of the real engine and tested on its own, finished and as a learner starts it.

Each tree's tests run once, in a process of their own, and several tests here read the result.
"""

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

from parts.manifest import Exercise, Part, load_parts, owners
from parts.tree import history, start
from tests.series.tiny import contents

ROOT = Path(__file__).resolve().parents[2]
PARTS = load_parts(ROOT)
LANDED = [part for part in PARTS if part.landed]
each_part = pytest.mark.parametrize("part", LANDED, ids=lambda part: part.name)


@dataclass(frozen=True)
class Run:
    """What a tree's own tests said."""

    engine: Path  # which engine they would import
    passed: int
    failures: list[tuple[str, str]]  # (test file, report) of every failure and error
    output: str


def run_tests(tree: Path, part: Part) -> Run:
    report = tree.parent / f"{tree.name}.xml"
    # As a learner would: without this run's settings and paths, and without the data folder.
    env = {
        k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "PYTHONPATH", "COV_", "RUVON_"))
    }
    options = ["-q", "-p", "no:cacheprovider", "-o", "junit_family=xunit1", f"--junitxml={report}"]
    command = [sys.executable, "-m", "parts", "test", str(part.number), "--", *options]
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, encoding="utf-8", check=False)
    where = [sys.executable, "-c", "import engine; print(engine.__file__)"]
    engine = subprocess.run(where, cwd=tree, env=env, capture_output=True, encoding="utf-8", check=True)
    assert report.exists(), done.stdout + done.stderr
    cases = list(ET.parse(report).iter("testcase"))
    failures = [
        (case.get("file"), f"{verdict.get('message')}\n{verdict.text}")
        for case in cases
        for verdict in case
        if verdict.tag in ("failure", "error")
    ]
    passed = sum(not {verdict.tag for verdict in case} & {"failure", "error", "skipped"} for case in cases)
    return Run(Path(engine.stdout.strip()), passed, failures, done.stdout + done.stderr)


@dataclass
class Tree:
    """One cut: where it is, what was in it when it was cut, and, once asked for, what its tests said."""

    part: Part
    folder: Path
    as_cut: dict[str, bytes]

    @cached_property
    def run(self) -> Run:
        run = run_tests(self.folder, self.part)
        assert run.engine == self.folder / "engine/__init__.py", "another engine won over the tree's"
        return run


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    """`history` of the real engine."""
    folder = tmp_path_factory.mktemp("history")
    history(ROOT, folder)
    return folder


@pytest.fixture(scope="module")
def trees(tmp_path_factory, repository) -> dict[tuple[Part, bool], Tree]:
    """Every (part, solved), all cut at once: a file edited while the tests run does not tell them apart."""
    made = {}
    for part in LANDED:
        for solved in (False, True):
            folder = tmp_path_factory.mktemp(part.name) / ("solved" if solved else "start")
            start(ROOT, part.number, folder, solved)
            made[part, solved] = Tree(part, folder, contents(folder))
    return made


@each_part
def test_the_solved_tree_passes_its_tests_with_nothing_of_a_later_part_present(trees, part):
    tree = trees[part, True]
    assert [path for path in tree.as_cut if min(owners(path, PARTS), default=0) > part.number] == []
    run = tree.run
    assert run.failures == [], run.output[-4000:]
    assert run.passed > 0, run.output[-4000:]


@each_part
def test_in_the_start_tree_every_exercise_is_reached_and_nothing_else_fails(trees, part):
    failures = trees[part, False].run.failures
    unannounced = [failure for failure in failures if part.announced(failure[1]) is None]
    assert unannounced == []
    assert {part.announced(report) for _, report in failures} == set(part.exercises)


@each_part
def test_the_manifest_names_the_test_files_that_turn_green(trees, part):
    red: dict[Exercise, set[str]] = {exercise: set() for exercise in part.exercises}
    for path, report in trees[part, False].run.failures:
        red[part.announced(report)].add(path)
    for exercise in part.exercises:
        assert set(exercise.tests) & red[exercise], f"{exercise.where}: none of {exercise.tests} waits for it"
    named = {path for exercise in part.exercises for path in exercise.tests}
    assert set().union(*red.values()) <= named


@each_part
def test_a_start_tree_differs_from_the_solved_one_in_the_exercises_alone(trees, part):
    begun, solved = trees[part, False].as_cut, trees[part, True].as_cut
    differing = {path for path in begun.keys() | solved.keys() if begun.get(path) != solved.get(path)}
    exercises = {exercise.path for exercise in part.exercises}
    assert differing == exercises | {"README.md", "conftest.py", "parts/cut.toml"}


def test_history_has_a_tag_per_landed_part_whose_tree_is_the_solved_one(trees, repository):
    git = ["git", "-C", str(repository)]
    tags = subprocess.run([*git, "tag"], check=True, capture_output=True, encoding="utf-8").stdout.split()
    assert tags == [f"part-{part.number:02d}" for part in LANDED]
    for part, tag in zip(LANDED, tags, strict=True):
        subprocess.run([*git, "checkout", "--quiet", tag], check=True)
        assert contents(repository) == trees[part, True].as_cut
