"""What `python -m parts test N` shows a learner, on the tiny repository."""

import shutil
from pathlib import Path

from parts.manifest import load_parts
from parts.mistakes import load_mistakes, make
from parts.tree import start
from tests.series.tiny import parts, python, write


def test_test_hands_on_arguments_and_exit_code(repo):
    assert parts(repo, "test", "1").returncode == 0
    assert parts(repo, "test", "1", "--", "-k", "nothing_of_that_name").returncode == 5


def test_the_start_tree_lists_waiting_tests_by_exercise_apart_from_real_failures(repo, tmp_path):
    x = tmp_path / "x"
    start(repo, 2, x, solved=False)
    first = parts(x, "test", "2")
    assert first.returncode == 1
    assert "2 of 2 exercises are not written yet; red tests are expected" in first.stdout
    assert f"engine: {x / 'engine'}" in first.stdout
    assert "2 tests wait for an exercise, 0 fail for another reason" in first.stdout
    one_line = "engine/two.py:words - write the word: 1 tests wait\n"
    assert one_line in first.stdout
    test = "    tests/part02/test_two.py::test_two_has_a_word\n"
    assert test not in first.stdout
    assert one_line + test in parts(x, "test", "2", "--", "-v").stdout
    # One exercise written, wrongly.
    written = (
        (x / "engine/two.py")
        .read_text()
        .replace('raise NotImplementedError("Part 2: write the word")', "return 2")
    )
    (x / "engine/two.py").write_text(written)
    second = parts(x, "test", "2")
    assert "1 of 2 exercises are not written yet" in second.stdout
    assert "1 tests wait for an exercise, 1 fail for another reason" in second.stdout
    listed, pointed_out = second.stdout.rpartition(" exercises ")[2].split("Look here first: ")
    assert "engine/two.py:words" not in listed
    assert pointed_out.startswith(
        "tests/part02/test_two.py::test_two_has_a_word\n"
        "    It checks engine/two.py:words.\n"
        "    AssertionError: the word is two\n"
        "    assert 2 == 'two'\n"
    )


def test_a_failure_names_the_exercises_that_its_test_calls(repo, tmp_path):
    """Both are written, one wrongly, and the same file is about both."""
    x = tmp_path / "x"
    start(repo, 2, x, solved=False)
    (x / "engine/two.py").write_text((repo / "engine/two.py").read_text().replace('"two"', "2"))
    said = parts(x, "test", "2").stdout
    assert "    It checks engine/two.py:words.\n" in said


def test_all_is_green_only_when_the_whole_part_ran(repo, tmp_path):
    x = tmp_path / "x"
    start(repo, 2, x, solved=False)
    shutil.copy(repo / "engine/two.py", x / "engine/two.py")
    green, part = "All green: see your code", "These are green. The whole part: `python -m parts test 2`"
    file = "tests/part02/test_two.py"
    assert green in parts(x, "test", "2").stdout
    for some in (["-k", "word"], [f"{file}::test_two_is_two"], ["--deselect", f"{file}::test_two_is_two"]):
        folder = ["tests/part02"] if some[0].startswith("-") else []
        done = python(x, "-m", "pytest", *folder, *some, PYTHONPATH=str(x))
        assert done.returncode == 0, done.stdout
        assert green not in done.stdout
        assert part in done.stdout


def with_a_small_file(repo: Path, test: str) -> None:
    """Part 2 gets a file about its second exercise alone; its first names the large file."""
    write(
        repo,
        "tests/part02/test_z_small.py",
        f"from engine.two import words\n\n\ndef test_small():\n    {test}\n",
    )
    manifest = repo / "parts/02_two/part.toml"
    one, two = '["tests/part02/test_two.py"]', '["tests/part02/test_z_small.py", "tests/part02/test_two.py"]'
    head, second = manifest.read_text().split('where = "engine/two.py:words"')
    manifest.write_text(f'{head}where = "engine/two.py:words"{second.replace(one, two)}')


def finished(repo: Path, target: Path, **changes: str) -> Path:
    """Part 2's start tree with its exercises written: with these words in place of those."""
    start(repo, 2, target, solved=False)
    source = (repo / "engine/two.py").read_text()
    for before, after in changes.items():
        source = source.replace(f'"{before}"', after)
    (target / "engine/two.py").write_text(source)
    return target


def test_files_run_from_small_to_large_those_that_no_exercise_names_first(repo, tmp_path):
    write(repo, "tests/part02/test_zz_unnamed.py", "def test_unnamed():\n    pass\n")
    with_a_small_file(repo, "pass")
    start(repo, 2, tmp_path / "x", solved=False)
    shown = parts(tmp_path / "x", "test", "2", "--", "-v").stdout
    names = ["::test_unnamed", "::test_small", "::test_two_is_two"]
    assert sorted(names, key=shown.index) == names


def test_the_first_failure_in_that_order_is_shown_last_and_larger_files_do_not_run(repo, tmp_path):
    with_a_small_file(repo, 'assert words() == "two", "it is a word of three letters"')
    x = finished(repo, tmp_path / "x", two="2")
    done = parts(x, "test", "2")
    assert done.returncode == 1
    before, shown = done.stdout.split("Look here first: ")
    assert shown.startswith(
        "tests/part02/test_z_small.py::test_small\n    It checks engine/two.py:words.\n"
        "    AssertionError: it is a word of three letters\n"
    )
    assert "short test summary info" in before, "pytest's list of names would push it out of sight"
    assert "0 tests wait for an exercise, 1 fail for another reason" in before
    assert "later files were not run: `python -m parts test 2 --all` runs them, too" in shown
    for everything in (["--all"], ["--", "--all"]):
        said = parts(x, "test", "2", *everything).stdout
        assert "2 fail for another reason" in said
        assert "Look here first: tests/part02/test_z_small.py::test_small\n" in said
        assert "later files were not run" not in said


def test_the_block_at_the_end_holds_each_known_mistakes_words(repo, tmp_path):
    """What parts/mistakes.py promises of each part, as a learner sees it."""
    with_a_small_file(repo, 'assert words() == "two", "the word is two"')
    x = finished(repo, tmp_path / "x")
    solution, mistakes = (x / "engine/two.py").read_text(), load_mistakes(repo, load_parts(repo)[1])
    for mistake in mistakes:
        (x / "engine/two.py").write_text(make(mistake, solution))
        said = python(x, "-m", "parts", "test", "2", PYTHONDONTWRITEBYTECODE="1").stdout
        _, block = said.split("Look here first: ")
        assert f"It checks {mistake.exercise}.\n" in block
        assert mistake.says in block, f"{mistake.exercise}: {mistake.name}"


def test_a_fixture_that_fails_in_a_large_file_is_not_shown_before_a_small_failure(repo, tmp_path):
    large = "import pytest\n\n\n@pytest.fixture\ndef broken():\n    assert False, 'large'\n\n\n"
    large += "def test_large(broken):\n    pass\n"
    with_a_small_file(repo, 'assert words() == "two", "small"')
    write(repo, "tests/part02/test_two.py", large)
    x = finished(repo, tmp_path / "x", two="2")
    assert "Look here first: tests/part02/test_z_small.py" in parts(x, "test", "2", "--all").stdout


def test_a_file_that_is_named_runs_alone(repo, tmp_path):
    with_a_small_file(repo, "pass")
    x = finished(repo, tmp_path / "x")
    for asked in (["test_z_small.py"], ["-q", "test_z_small.py"], ["test_z_small.py::test_small"]):
        done = parts(x, "test", "2", "--", *[name.replace("test_z", "tests/part02/test_z") for name in asked])
        assert "1 passed" in done.stdout, done.stdout + done.stderr
        assert "These are green. The whole part: `python -m parts test 2`" in done.stdout
    left_out = parts(x, "test", "2", "--", "--deselect", "tests/part02/test_z_small.py::test_small")
    assert "3 passed, 1 deselected" in left_out.stdout


def test_green_is_not_all_green_where_a_package_is_missing(repo, tmp_path):
    project = repo / "pyproject.toml"
    extras = 'pictures = ["not-to-be-had>=1"]\ngpu = ["elsewhere; sys_platform == \'nowhere\'"]\n'
    project.write_text(f"{project.read_text()}\n[project.optional-dependencies]\n{extras}")
    skips = "import pytest\n\npytest.importorskip('{}', reason='needs {}: it draws')\n"
    write(repo, "tests/part02/test_pictures.py", skips.format("not_to_be_had", "not-to-be-had"))
    said = parts(finished(repo, tmp_path / "x"), "test", "2").stdout
    assert (
        "Not run, since not-to-be-had is not installed (pip install 'ruvon[pictures]' brings it):\n"
        "    tests/part02/test_pictures.py\n"
        "What ran is green: see your code at work with `python -m parts run 2`.\n"
    ) in said
    assert "All green" not in said
    (repo / "tests/part02/test_pictures.py").unlink()
    write(repo, "tests/part02/test_elsewhere.py", skips.format("elsewhere", "elsewhere"))
    said = parts(finished(repo, tmp_path / "y"), "test", "2").stdout
    needs = 'it needs sys_platform == "nowhere": a container, or WSL on Windows'
    assert (
        f"Not run, since elsewhere is not installed ({needs}):\n    tests/part02/test_elsewhere.py\n" in said
    )
    assert "What ran is green: see your code" in said, "what this system cannot have has not run either"


def test_green_is_not_all_green_where_no_test_that_ran_meets_an_unwritten_exercise(repo, tmp_path):
    two = "import pytest\n\n\n@pytest.mark.skip(reason='not here')\ndef test_two_has_a_word():\n    pass\n"
    write(repo, "tests/part02/test_two.py", two)
    x = tmp_path / "x"
    start(repo, 2, x, solved=False)
    said = parts(x, "test", "2").stdout
    assert (
        "Not written, and no test that ran meets it: engine/two.py:Two.value, engine/two.py:words.\n" in said
    )
    assert "What ran is green" in said
