"""Every landed part, cut out of the real engine and tested on its own, finished and as a learner starts it.

`make test` runs a part's tests here, and only here: each file once, in the part's solved tree, where nothing
of a later part is present. The data folder is handed to them; a start tree has none, as at a learner's.
"""

import os
import subprocess
from pathlib import Path

import pytest

from parts.manifest import load_parts, matches, owners
from parts.tree import history, source_files
from tests.series.tiny import contents

ROOT = Path(__file__).resolve().parents[2]
PARTS = load_parts(ROOT)
LANDED = [part for part in PARTS if part.landed]
FILES = [
    pytest.param(part, path, id=f"{part.name}-{Path(path).name}")
    for part in LANDED
    for path in source_files(ROOT)
    if matches(path, f"{part.tests}/test_*.py")
]
DATA = {"RUVON_DATA": str(ROOT.parent / "shared" / "data")}
DATA |= {key: value for key, value in os.environ.items() if key in ("RUVON_DATA", "RUVON_REQUIRE_DATA")}
each_part = pytest.mark.parametrize("part", LANDED, ids=lambda part: part.name)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("part", "path"), FILES)
def test_the_file_passes_in_the_solved_tree(warm, trees, part, path):
    tree = trees(part, solved=True)
    run = warm.pytest(tree, [path, "-q"], seconds=900, env=DATA)
    assert not run.problem, run.output
    assert run.failures == (), run.output
    assert run.engine in (str(tree / "engine/__init__.py"), None), "another engine won over the tree's"
    assert run.passed > 0 or run.skipped > 0, run.output


@pytest.mark.timeout(900)
@each_part
def test_in_the_start_tree_the_named_files_wait_for_the_exercises_and_nothing_else_fails(warm, trees, part):
    run = warm.pytest(trees(part, solved=False), [part.tests, "-q"], seconds=900)
    assert not run.problem, run.output
    waiting = {exercise: set() for exercise in part.exercises}
    for failure in run.failures:
        exercise = part.announced(failure.report)
        assert exercise, f"{failure.test} fails for another reason than an open exercise:\n{failure.report}"
        waiting[exercise].add(failure.path)
    for exercise, files in waiting.items():
        assert files & set(exercise.tests), f"{exercise.where}: none of {exercise.tests} waits for it"
    named = {path for exercise in part.exercises for path in exercise.tests}
    assert set().union(*waiting.values()) <= named, "a test file turns green that the manifest does not name"


@each_part
def test_a_solved_tree_holds_nothing_of_a_later_part_and_a_start_tree_differs_in_the_exercises(trees, part):
    begun, solved = contents(trees(part, solved=False)), contents(trees(part, solved=True))
    assert [path for path in solved if min(owners(path, PARTS), default=0) > part.number] == []
    differing = {path for path in begun.keys() | solved.keys() if begun.get(path) != solved.get(path)}
    exercises = {exercise.path for exercise in part.exercises}
    assert differing == exercises | {"README.md", "conftest.py", "parts/cut.toml"}


def test_history_has_a_tag_per_landed_part_whose_tree_is_the_solved_one(trees, tmp_path):
    history(ROOT, tmp_path)
    git = ["git", "-C", str(tmp_path)]
    tags = subprocess.run([*git, "tag"], check=True, capture_output=True, encoding="utf-8").stdout.split()
    assert tags == [f"part-{part.number:02d}" for part in LANDED]
    for part, tag in zip(LANDED, tags, strict=True):
        subprocess.run([*git, "checkout", "--quiet", tag], check=True)
        assert contents(tmp_path) == contents(trees(part, solved=True))
