"""What `python -m parts` says and refuses, on the tiny repository."""

import pytest
from typer.testing import CliRunner

from parts.cli import app
from parts.tree import start
from tests.series.tiny import parts


def test_list_shows_landed_parts_how_many_of_twenty_they_are_and_what_is_coming(repo):
    done = parts(repo, "list")
    assert done.returncode == 0
    assert "How I counted to two" in done.stdout
    assert "All together" not in done.stdout
    assert "2 of 20 parts have landed" in done.stdout
    assert "Coming: Part 20, Showcase" in done.stdout


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


@pytest.mark.parametrize(("command", "package"), [(("test", "3"), "pytest"), (("lab",), "jupyterlab")])
def test_after_make_demo_alone_it_says_what_tests_and_notebooks_need(monkeypatch, command, package):
    monkeypatch.setattr("parts.cli.find_spec", lambda _: None)
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2
    assert f"{package} is not installed here; in the checkout, `make .venv/.dev`" in done.stderr


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
