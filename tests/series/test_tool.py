"""What `python -m parts` does, on the tiny repository: fast, and free to break things."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from parts.manifest import SeriesError
from parts.tree import history, start
from tests.series.tiny import contents, write


def python(root: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess:
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # seconds per run, and the tiny repository needs none
    return subprocess.run(
        [sys.executable, *arguments], cwd=root, env=env | more, capture_output=True, encoding="utf-8"
    )


def parts(root: Path, *arguments: str) -> subprocess.CompletedProcess:
    return python(root, "-m", "parts", *arguments)


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, encoding="utf-8")
    return done.stdout


def test_list_shows_landed_parts_only_and_says_how_many_of_twenty(repo):
    done = parts(repo, "list")
    assert done.returncode == 0
    assert "How I counted to two" in done.stdout
    assert "Showcase" not in done.stdout
    assert "2 of 20 parts have landed" in done.stdout


def test_show_names_the_exercises_and_what_to_write(repo):
    done = parts(repo, "show", "2")
    assert "engine/two.py:Two.value" in done.stdout
    assert "write the word" in done.stdout
    assert "not written yet" not in done.stdout


def test_a_part_that_has_not_landed_is_refused_with_those_that_have(repo):
    done = parts(repo, "show", "20")
    assert done.returncode == 2
    assert "part 20" in done.stderr
    assert "accepted: 1, 2" in done.stderr


def test_run_hands_on_arguments_and_exit_code(repo):
    done = parts(repo, "run", "1", "--", "--serve", "x")
    assert done.returncode == 7
    assert done.stdout.strip() == f"{repo / 'engine/one.py'} --serve x"
    assert parts(repo, "run", "1", "--serve", "x").stdout == done.stdout


def test_test_hands_on_arguments_and_exit_code(repo):
    assert parts(repo, "test", "1").returncode == 0
    assert parts(repo, "test", "1", "--", "-k", "nothing_of_that_name").returncode == 5


def test_start_cuts_the_exercises_and_nothing_else(repo, tmp_path):
    assert parts(repo, "start", "2", str(tmp_path / "x")).returncode == 0
    assert (tmp_path / "x/engine/one.py").read_text() == (repo / "engine/one.py").read_text()
    assert (
        (tmp_path / "x/engine/two.py").read_text()
        == '''"""Part 2."""

import functools

from engine.one import one  # stays


class Two:
    """Counts to two."""

    @functools.cached_property
    def value(self) -> int:
        """Two,
        at last."""
        raise NotImplementedError(
            "Part 2: add one to one, and say it in so many words that the line would be longer than may be"
        )

    # between the methods
    def half(self) -> float: return self.value / 2


def words() -> str:
    """The word."""
    raise NotImplementedError("Part 2: write the word")
'''
    )


def test_a_tree_holds_what_its_part_needs_and_nothing_later(repo, tmp_path):
    start(repo, 1, tmp_path / "x", solved=True)
    tool = {f"parts/{module.name}" for module in (repo / "parts").glob("*.py")}
    assert sorted(set(contents(tmp_path / "x")) - tool) == [
        ".gitignore",
        "LICENSE",
        "README.md",
        "articles/01_one.md",
        "constraints.txt",
        "engine/__init__.py",
        "engine/data/weights.bin",
        "engine/one.py",
        "parts/01_one/demo.py",
        "parts/01_one/part.toml",
        "parts/cut.toml",
        "pyproject.toml",
        "tests/conftest.py",
        "tests/part01/test_one.py",
    ]


def test_files_that_git_ignores_stay_behind_and_new_ones_come_along(repo, tmp_path):
    write(repo, "tests/part01/ignored.py", "")
    write(repo, "tests/part01/test_new.py", "")
    start(repo, 1, tmp_path / "x", solved=True)
    assert (tmp_path / "x/tests/part01/test_new.py").exists()
    assert not (tmp_path / "x/tests/part01/ignored.py").exists()


def test_a_tree_before_the_last_part_has_no_command_to_install(repo, tmp_path):
    start(repo, 2, tmp_path / "x", solved=True)
    text = (tmp_path / "x/pyproject.toml").read_text()
    assert "ruvon" not in text
    assert "scripts" not in text
    assert '[tool.pytest.ini_options]\ntestpaths = ["tests"]' in text


def test_the_readme_says_what_to_write_where_and_that_red_is_expected(repo, tmp_path):
    start(repo, 2, tmp_path / "x", solved=False)
    text = (tmp_path / "x/README.md").read_text()
    for words in (
        "**`Two.value`** in [`engine/two.py`]",
        "Add one to one",
        "Turns green: `tests/part02/test_two.py`",
        "It builds on Parts 1.",
        "The environment of the checkout",
        "Red tests are expected",
        "python -m parts test 2",
        "pip install -c constraints.txt",
        "articles/02_two.md",
    ):
        assert words in text


def test_the_start_tree_lists_waiting_tests_by_exercise_apart_from_real_failures(repo, tmp_path):
    x = tmp_path / "x"
    start(repo, 2, x, solved=False)
    first = parts(x, "test", "2")
    assert first.returncode == 1
    assert "2 of 2 exercises are not written yet; red tests are expected" in first.stdout
    assert f"engine: {x / 'engine'}" in first.stdout
    assert "2 tests wait for an exercise, 0 fail for another reason" in first.stdout
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


def test_a_file_that_needs_a_gpu_is_said_to_be_skipped_without_one(repo, tmp_path):
    manifest = repo / "parts/02_two/part.toml"
    tests = 'tests = ["tests/part02/test_two.py"'
    manifest.write_text(manifest.read_text().replace(tests, f'{tests}, "tests/part02/test_on_a_gpu.py"'))
    start(repo, 2, tmp_path / "x", solved=False)
    said = "`tests/part02/test_two.py`, `tests/part02/test_on_a_gpu.py` (skipped without a GPU)"
    assert said in (tmp_path / "x/README.md").read_text()


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
    write(repo, "tests/part02/test_elsewhere.py", skips.format("elsewhere", "elsewhere"))
    said = parts(finished(repo, tmp_path / "x"), "test", "2").stdout
    assert (
        "Not run, since not-to-be-had is not installed (pip install 'ruvon[pictures]' brings it):\n"
        "    tests/part02/test_pictures.py\n"
        "What ran is green: see your code at work with `python -m parts run 2`.\n"
    ) in said
    assert "All green" not in said
    (repo / "tests/part02/test_pictures.py").unlink()
    said = parts(finished(repo, tmp_path / "y"), "test", "2").stdout
    assert "All green: see your code" in said, "what no extra brings to this system is not missing"


def test_a_solved_tree_is_green_and_lists_its_parts(repo, tmp_path):
    assert parts(repo, "start", "2", str(tmp_path / "x"), "--solved").returncode == 0
    assert parts(tmp_path / "x", "test", "2").returncode == 0
    assert "2 of 20 parts have landed" in parts(tmp_path / "x", "list").stdout
    assert parts(tmp_path / "x", "run", "1").stdout.strip() == str(tmp_path / "x/engine/one.py")


@pytest.mark.parametrize("command", [("start", "2"), ("start", "2", "--solved"), ("history",)])
def test_a_folder_with_anything_in_it_is_refused_and_untouched(repo, tmp_path, command):
    write(tmp_path, "mine/.hidden", "precious")
    write(tmp_path, "file", "precious")
    for target in ("mine", "file"):
        done = parts(repo, *command, str(tmp_path / target))
        assert done.returncode == 2
        assert "is not empty: nothing was written" in done.stderr
    assert contents(tmp_path / "mine") == {".hidden": b"precious"}
    assert (tmp_path / "file").read_text() == "precious"


def test_an_empty_folder_is_accepted(repo, tmp_path):
    (tmp_path / "x").mkdir()
    start(repo, 1, tmp_path / "x", solved=False)
    assert (tmp_path / "x/README.md").exists()


@pytest.mark.parametrize("command", [("start", "1"), ("history",)])
def test_a_cut_tree_is_not_cut_again(repo, tmp_path, command):
    start(repo, 2, tmp_path / "x", solved=False)
    done = parts(tmp_path / "x", *command, str(tmp_path / "y"))
    assert done.returncode == 2
    assert "itself a tree cut at Part 2" in done.stderr
    assert not (tmp_path / "y").exists()


def test_without_a_checkout_the_tool_says_what_it_needs(repo, tmp_path):
    (repo / ".git").rename(tmp_path / "git")
    done = parts(repo, "start", "1", str(tmp_path / "x"))
    assert done.returncode == 2
    assert "not a git checkout" in done.stderr
    assert not (tmp_path / "x").exists()
    for manifest in repo.glob("parts/*/part.toml"):
        manifest.unlink()
    done = parts(repo, "list")
    assert done.returncode == 2
    assert "Clone the repository" in done.stderr


def test_an_exercise_that_cannot_be_cut_is_refused_before_anything_is_written(repo, tmp_path):
    write(repo, "engine/one.py", "def two():\n    return 2\n")
    with pytest.raises(SeriesError, match=r"engine/one\.py: no 'one' for the exercise 'one'"):
        start(repo, 1, tmp_path / "x", solved=False)
    assert not (tmp_path / "x").exists()


def test_a_link_to_a_later_article_is_plain_words_in_the_tree(repo, tmp_path):
    start(repo, 1, tmp_path / "x1", solved=True)
    text = "How I counted to one: see [it](../engine/one.py), next is two.\n"
    assert (tmp_path / "x1/articles/01_one.md").read_text() == text
    start(repo, 2, tmp_path / "x2", solved=True)
    assert (tmp_path / "x2/articles/01_one.md").read_text() == (repo / "articles/01_one.md").read_text()


def test_start_says_how_to_go_on_in_this_environment(repo, tmp_path):
    done = parts(repo, "start", "2", str(tmp_path / "x"))
    assert f"cd {tmp_path / 'x'}\n" in done.stdout
    assert f"{sys.executable} -m parts test 2\n" in done.stdout


def test_a_grade_is_shown_as_stars(repo, tmp_path):
    assert "★" not in parts(repo, "show", "2").stdout
    manifest = repo / "parts/02_two/part.toml"
    manifest.write_text(manifest.read_text() + "grade = 2\n")
    assert "engine/two.py:words ★★ " in parts(repo, "show", "2").stdout
    start(repo, 2, tmp_path / "x", solved=False)
    assert "**`words`** ★★ in" in (tmp_path / "x/README.md").read_text()


def test_the_mistakes_are_shown_as_a_table_and_a_problem_fails(repo):
    done = parts(repo, "mistakes", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    test = "`tests/part02/test_two.py::test_two_is_two`"
    assert f"| `engine/two.py:Two.value` | three | {test} | two is one and one |\n" in done.stdout
    file = repo / "parts/02_two/mistakes.toml"
    file.write_text(file.read_text().replace('says = "word"', 'says = "verb"', 1))
    done = parts(repo, "mistakes", "2")
    assert done.returncode == 1
    assert "| **the first failure does not say 'verb'** |" in done.stdout


def test_history_has_a_commit_and_a_tag_per_part_whose_tree_is_the_solved_one(repo, tmp_path):
    assert parts(repo, "history", str(tmp_path / "h")).returncode == 0
    assert git(tmp_path / "h", "tag").split() == ["part-01", "part-02"]
    assert git(tmp_path / "h", "log", "--format=%s").splitlines() == ["Part 2: Two", "Part 1: One"]
    for number in (1, 2):
        git(tmp_path / "h", "checkout", "-q", f"part-{number:02d}")
        start(repo, number, tmp_path / f"x{number}", solved=True)
        assert contents(tmp_path / "h") == contents(tmp_path / f"x{number}")


def test_the_difference_of_two_tags_is_what_the_part_adds(repo, tmp_path):
    history(repo, tmp_path / "h")
    changed = git(tmp_path / "h", "diff", "--name-status", "part-01", "part-02").splitlines()
    assert changed == [
        "M\tREADME.md",
        "M\tarticles/01_one.md",
        "A\tarticles/02_two.md",
        "A\tengine/two.py",
        "A\tnotebooks/02_two.ipynb",
        "A\tparts/02_two/part.toml",
        "M\tparts/cut.toml",
        "A\ttests/part02/test_two.py",
    ]


def test_history_of_the_same_source_gives_the_same_commits(repo, tmp_path, monkeypatch):
    history(repo, tmp_path / "h1")
    monkeypatch.setenv("GIT_AUTHOR_NAME", "somebody else")
    history(repo, tmp_path / "h2")
    ids = [git(tmp_path / h, "rev-parse", "part-01", "part-02") for h in ("h1", "h2")]
    assert ids[0] == ids[1]
