"""Lettered extensions: what holds for a part holds for A and B, which the tiny repository gets here."""

import subprocess
import sys
from pathlib import Path

import pytest

from engine.wiring.extensions import EXTENSIONS
from parts.manifest import Number, SeriesError, load_parts
from parts.tree import start
from tests.series import checks
from tests.series.tiny import breaches, contents, git, mistakes, parts, write

ROOT = Path(__file__).resolve().parents[2]
LETTERS = {
    "engine/three.py": '''
        """Extension A."""

        from engine import llm


        def three() -> int:
            """The number three."""
            return llm.Two().value + 1
        ''',
    "engine/four.py": '"""Extension B."""\n\nfrom engine.three import three\n\nfour = three\n',
    "tests/partA/test_three.py": """
        from engine.three import three


        def test_three_is_three():
            assert three() == 3, "three is one more than two"
        """,
    "articles/A_three.md": "An `LLM` counts: after [two](02_two.md) comes [four](B_four.md).\n",
    "notebooks/A_three.ipynb": """
        {"cells": [{"cell_type": "code", "source": ["from engine.three import three\\n", "!ruvon generate"]}]}
        """,
    "parts/A_three/demo.py": """
        import sys

        from engine.three import three

        print(three(), *sys.argv[1:])
        sys.exit(9)
        """,
    "parts/A_three/part.toml": """
        number = "A"
        slug = "three"
        title = "Three"
        article = "How I counted on"
        capability = "Counts to three."
        minutes = 15
        needs = [2, 20]
        landed = true
        adds = ["engine/three.py"]

        [[exercises]]
        where = "engine/three.py:three"
        write = "add one to two"
        tests = ["tests/partA/test_three.py"]
        """,
    "parts/A_three/mistakes.toml": mistakes(
        "engine/three.py:three", "+ 1", "three is one more than two",
        none="", two="+ 2", minus="- 1", times="* 1",
    ),
    "parts/B_four/part.toml": """
        number = "B"
        slug = "four"
        title = "Four"
        article = "How I counted further"
        capability = "Counts to four."
        minutes = 15
        needs = ["A"]
        landed = true
        adds = ["engine/four.py"]
        """,
}  # fmt: skip


@pytest.fixture
def lettered(repo: Path) -> Path:
    """The tiny repository, its Part 20 landed, with Extensions A and B."""
    for path, text in LETTERS.items():
        write(repo, path, text)
    manifest = repo / "parts/20_showcase/part.toml"
    manifest.write_text(manifest.read_text().replace("landed = false", "landed = true"))
    return repo


def not_landed(repo: Path, folder: str) -> None:
    manifest = repo / "parts" / folder / "part.toml"
    manifest.write_text(manifest.read_text().replace("landed = true", "landed = false"))


def test_letters_come_after_the_numbers_and_in_the_order_of_the_alphabet(lettered):
    assert [str(part.number) for part in load_parts(lettered)] == ["1", "2", "20", "A", "B"]
    assert Number.read("a") == Number.read("A") > Number.read(20)
    assert Number.read("B") > Number.read("A")


def test_list_shows_letters_that_landed_behind_the_parts_and_those_that_are_coming(lettered):
    done = parts(lettered, "list").stdout
    assert done.index("All together") < done.index("How I counted on") < done.index("How I counted further")
    assert "3 of 20 parts and Extension A and Extension B have landed" in done
    not_landed(lettered, "B_four")
    done = parts(lettered, "list").stdout
    assert "3 of 20 parts and Extension A have landed" in done
    assert "How I counted further" not in done
    assert "Coming: Extension B, Four" in done


@pytest.mark.parametrize("letter", ["A", "a"])
def test_show_run_test_and_start_take_a_letter_in_either_case(lettered, tmp_path, letter):
    shown = parts(lettered, "show", letter).stdout
    assert shown.startswith("Extension A: Three\n")
    assert "Needs parts: 2, 20." in shown
    assert "python -m parts start A DIR" in shown
    assert "articles/A_three.md" in shown
    ran = parts(lettered, "run", letter, "--", "x")
    assert (ran.returncode, ran.stdout) == (9, "3 x\n")
    assert parts(lettered, "test", letter).returncode == 0
    assert parts(lettered, "start", letter, str(tmp_path / "x")).returncode == 0


@pytest.mark.parametrize("name", ["C", "21", "0", "A1", "three"])
@pytest.mark.parametrize("command", ["show", "run", "test", "mistakes", "start"])
def test_what_is_not_there_is_refused_with_what_is(lettered, tmp_path, command, name):
    done = parts(lettered, command, name, *[str(tmp_path / "x")] * (command == "start"))
    assert done.returncode == 2
    assert f"part {name} is not here" in done.stderr
    assert "accepted: 1, 2, 20, A, B" in done.stderr


def test_a_tree_of_a_letter_holds_part_20_and_the_letters_before_it(lettered, tmp_path):
    for name in ("20", "A", "B"):
        start(lettered, name, tmp_path / name, solved=True)
    held = {name: set(contents(tmp_path / name)) for name in ("20", "A", "B")}
    assert "engine/llm.py" in held["20"] & held["A"] & held["B"]
    assert not {path for path in held["20"] if "A_three" in path or "partA" in path or "three" in path}
    own = {path for path in LETTERS if path != "parts/A_three/mistakes.toml"}
    of_b = {"engine/four.py", "parts/B_four/part.toml"}
    assert held["A"] - held["20"] == own - of_b
    assert held["B"] - held["A"] == of_b
    assert "[project.scripts]" in (tmp_path / "A/pyproject.toml").read_text(), "`ruvon` is there"
    assert (tmp_path / "A/articles/A_three.md").read_text().endswith("[two](02_two.md) comes four.\n")
    assert (tmp_path / "B/articles/A_three.md").read_text().endswith("comes [four](B_four.md).\n")
    assert "- Extension A: [Three](articles/A_three.md) (this one)" in (tmp_path / "A/README.md").read_text()


def test_a_start_tree_of_a_letter_waits_for_its_exercises(lettered, tmp_path):
    x = tmp_path / "x"
    start(lettered, "A", x, solved=False)
    assert 'raise NotImplementedError("Extension A: add one to two")' in (x / "engine/three.py").read_text()
    assert (x / "README.md").read_text().startswith("# Extension A: Three\n")
    assert "engine/three.py:three (not written yet)" in parts(x, "show", "a").stdout
    done = parts(x, "test", "A")
    assert done.returncode == 1
    assert "1 tests wait for an exercise, 0 fail for another reason." in done.stdout
    (x / "engine/three.py").write_text((lettered / "engine/three.py").read_text())
    done = parts(x, "test", "A")
    assert done.returncode == 0
    assert "see your code at work with `python -m parts run A`" in done.stdout
    done = parts(x, "start", "1", str(tmp_path / "y"))
    assert done.returncode == 2
    assert "itself a tree cut at Extension A" in done.stderr


def test_history_ends_with_the_letters(lettered, tmp_path):
    assert parts(lettered, "history", str(tmp_path / "h")).returncode == 0
    assert git(tmp_path / "h", "tag").split() == ["part-01", "part-02", "part-20", "part-A", "part-B"]
    log = git(tmp_path / "h", "log", "--format=%s %D").splitlines()
    assert log[1].startswith("Extension A: Three")
    assert "tag: part-A" in log[1]
    git(tmp_path / "h", "checkout", "-q", "part-A")
    start(lettered, "A", tmp_path / "x", solved=True)
    assert contents(tmp_path / "h") == contents(tmp_path / "x")


def test_the_mistakes_of_a_letter_are_rejected_in_its_words(lettered):
    done = parts(lettered, "mistakes", "A")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("`tests/partA/test_three.py::test_three_is_three`") == 4


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('number = "A"', 'number = "AA"', "'AA': accepted: 1 to 20, or a letter"),
        ('number = "A"', "number = 21", "21: accepted: 1 to 20, or a letter"),
        ('number = "A"', 'number = "C"', "number and slug make 'C_three', the folder is 'A_three'"),
        ("needs = [2, 20]", 'needs = [2, "B"]', "needs = [2, B]: accepted are parts before A"),
        ("needs = [2, 20]", 'needs = [2, "xx"]', "'xx': accepted: 1 to 20, or a letter"),
    ],
)
def test_a_letters_manifest_that_is_wrong_is_refused(lettered, before, after, message):
    manifest = lettered / "parts/A_three/part.toml"
    manifest.write_text(manifest.read_text().replace(before, after))
    with pytest.raises(SeriesError, match=r"A_three/part.toml") as refusal:
        load_parts(lettered)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    "rule", [checks.ownership, checks.later_imports, checks.early_showcase, checks.broken_links]
)
def test_a_letter_may_use_what_part_20_brings_and_an_earlier_letter(lettered, rule):
    assert breaches(rule, lettered) == []


@pytest.mark.parametrize(
    ("place", "code", "breach"),
    [
        ("engine/llm.py", "import engine.three\n", "engine.three is in engine/three.py, of part A > 20"),
        ("engine/three.py", "import engine.four\n", "engine.four is in engine/four.py, of part B > A"),
        ("tests/part02/test_two.py", "import engine.three\n", "engine/three.py, of part A > 2"),
    ],
)
def test_an_import_of_a_letter_from_before_it_is_caught(lettered, place, code, breach):
    write(lettered, place, code)
    (found,) = breaches(checks.later_imports, lettered)
    assert found.startswith(f"{place}:1: ")
    assert breach in found


def test_every_letter_of_this_repository_is_found_by_its_slug():
    letters = {str(part.number): part.slug for part in load_parts(ROOT) if part.number.is_letter}
    assert letters == EXTENSIONS, "engine/wiring/extensions.py finds an extension by its manifest's slug"


def test_part_20_does_without_the_files_of_the_letters(trees):
    """In a tree cut at Part 20 the option of a letter is refused by name, and no command's help shows it."""
    tree = trees(load_parts(ROOT)[19], solved=True)
    code = "from engine import EngineArgs\nfor n in (1, 2):\n    EngineArgs(tensor_parallel_size=n)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, encoding="utf-8")
    assert "ValueError: tensor_parallel_size=2: comes with Extension A (many_devices)" in done.stderr
    command = [sys.executable, "-m", "engine.cli.main", "serve"]
    shown = subprocess.run([*command, "--help"], cwd=tree, capture_output=True, encoding="utf-8")
    assert shown.returncode == 0
    assert "--max-num-seqs" in shown.stdout
    assert "--tensor-parallel" not in shown.stdout
    refused = subprocess.run(
        [*command, "--tensor-parallel-size", "2"], cwd=tree, capture_output=True, encoding="utf-8"
    )
    assert refused.returncode == 1
    assert refused.stderr.startswith("ruvon serve: tensor_parallel_size=2: comes with Extension A")
