"""Every landed part, cut out of the real engine and tested on its own, as a learner starts it and finished.

`make test` runs a part's tests here, and only here, where nothing of a later part is present: all in the
start tree, and those that fail or are skipped there again in the solved one. The data folder is handed to
the latter; a start tree has none, as at a learner's.
"""

import os
import subprocess
from pathlib import Path

import pytest

from parts.manifest import load_parts, owners
from parts.tree import history
from tests.series.tiny import contents

ROOT = Path(__file__).resolve().parents[2]
PARTS = load_parts(ROOT)
LANDED = [part for part in PARTS if part.landed]
LONGEST_FIRST = LANDED[::-1]  # a later part has more tests, and each takes longer
DATA = {"RUVON_DATA": str(ROOT.parent / "shared" / "data")}
DATA |= {key: value for key, value in os.environ.items() if key in ("RUVON_DATA", "RUVON_REQUIRE_DATA")}
each_part = pytest.mark.parametrize("part", LONGEST_FIRST, ids=lambda part: part.name)


@pytest.mark.timeout(7500)
@each_part
def test_the_start_tree_waits_for_its_exercises_alone_and_the_solved_tree_passes(warm, trees, part):
    begun = warm.pytest(trees(part, solved=False), [part.tests, "-q"], seconds=3600)
    own = (str(trees(part, solved=False) / "engine/__init__.py"), None)
    assert not begun.problem, begun.output
    assert begun.engine in own, "another engine won over the tree's"
    waiting = {exercise: set() for exercise in part.exercises}
    for failure in begun.failures:
        exercise = part.announced(failure.report)
        assert exercise, f"{failure.test} fails for another reason than an open exercise:\n{failure.report}"
        assert "::" in failure.test, f"{failure.test} calls {exercise.where} while it is imported"
        waiting[exercise].add(failure.path)
    for exercise, files in waiting.items():
        assert files & set(exercise.tests), f"{exercise.where}: none of {exercise.tests} waits for it"
    named = {path for exercise in part.exercises for path in exercise.tests}
    assert set().union(*waiting.values()) <= named, "a test file turns green that the manifest does not name"
    # The trees differ in the exercises' bodies. A test that passed without meeting one is not run again.
    met = [test for test, said in begun.passed.items() if "NotImplementedError" in said]
    rest = dict.fromkeys([*(failure.test for failure in begun.failures), *begun.skipped, *met])
    run = warm.pytest(trees(part, solved=True), [*rest, "-q"], seconds=3600, env=DATA)
    assert not run.problem, run.output
    assert run.failures == (), run.output
    assert run.engine == str(trees(part, solved=True) / "engine/__init__.py")
    assert run.passed, run.output
    assert len(run.passed) + len(run.skipped) >= len(begun.failures), run.output


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
    assert tags == [f"part-{part.number.tag}" for part in LANDED]
    for part, tag in zip(LANDED, tags, strict=True):
        subprocess.run([*git, "checkout", "--quiet", tag], check=True)
        assert contents(tmp_path) == contents(trees(part, solved=True))
