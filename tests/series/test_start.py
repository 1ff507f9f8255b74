"""What `python -m parts start` and `history` write, from the tiny repository."""

import sys

import pytest

from parts.manifest import SeriesError
from parts.tree import history, start
from tests.series.tiny import contents, git, parts, write


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


def test_a_file_that_needs_a_gpu_is_said_to_be_skipped_without_one(repo, tmp_path):
    manifest = repo / "parts/02_two/part.toml"
    tests = 'tests = ["tests/part02/test_two.py"'
    manifest.write_text(manifest.read_text().replace(tests, f'{tests}, "tests/part02/test_on_a_gpu.py"'))
    start(repo, 2, tmp_path / "x", solved=False)
    said = "`tests/part02/test_two.py`, `tests/part02/test_on_a_gpu.py` (skipped without a GPU)"
    assert said in (tmp_path / "x/README.md").read_text()


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
