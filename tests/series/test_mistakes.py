"""Each part's known mistakes are rejected in the words that its file demands.

python -m pytest tests/series/test_mistakes.py -k 05_sampling
python -m parts mistakes 5                                      # the same, as a table
"""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from parts.manifest import SeriesError, load_parts
from parts.mistakes import Mistake, judge, load_mistakes, make
from parts.tree import start
from tests.series.tiny import write

ROOT = Path(__file__).resolve().parents[2]
LANDED = [part for part in load_parts(ROOT) if part.landed]


def known() -> list:
    """Every mistake of every part, as far as the files can be read."""
    found = []
    for part in LANDED:
        try:
            mistakes = load_mistakes(ROOT, part)
        except SeriesError:
            continue  # the first test says so
        found += [
            pytest.param(part, mistake, id=f"{part.name}-{mistake.exercise.split(':')[1]}-{mistake.name}")
            for mistake in mistakes
        ]
    return found


@pytest.mark.parametrize("part", LANDED, ids=lambda part: part.name)
def test_each_exercise_has_its_mistakes(part):
    load_mistakes(ROOT, part)


def test_no_mistake_names_what_its_file_does_not_know(tmp_path):
    """A name that a file imports no longer is found here in a second; its test would take half of CI."""
    places = {}
    for number, (part, mistake) in enumerate(case.values for case in known()):
        changed = make(mistake, (ROOT / mistake.exercise.split(":")[0]).read_text(encoding="utf-8"))
        write(tmp_path, f"m{number}.py", changed)
        places[f"m{number}.py"] = f"{part.name}, {mistake.exercise}: {mistake.name!r}"
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select", "F821"]
    done = subprocess.run(
        [*ruff, "--output-format", "json", str(tmp_path)], capture_output=True, encoding="utf-8"
    )
    unknown = [f"{places[Path(at['filename']).name]}: {at['message']}" for at in json.loads(done.stdout)]
    assert unknown == []
    assert len(places) > 0


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("part", "mistake"), known())
def test_the_mistake_is_rejected_in_its_words(warm, trees, part, mistake):
    verdict = judge(warm, trees(part, solved=True), part, mistake)
    assert not verdict.problem, str(verdict)


# What the runner refuses, on the tiny repository, whose own mistakes are all rejected.


@pytest.fixture
def tiny(repo, tmp_path):
    """(the tiny repository, its Part 2, that part's solved tree)"""
    part = load_parts(repo)[1]
    start(repo, 2, tmp_path / "tree", solved=True)
    return repo, part, tmp_path / "tree"


def test_the_tiny_mistakes_are_rejected(tiny, warm):
    repo, part, tree = tiny
    mistakes = load_mistakes(repo, part)
    verdicts = [judge(warm, tree, part, mistake) for mistake in mistakes]
    assert [str(v) for v in verdicts if v.problem] == []
    assert verdicts[0].test == "tests/part02/test_two.py::test_two_is_two"
    assert "two is one and one\nassert 1 == 2" in verdicts[0].says
    assert (tree / "engine/two.py").read_bytes() == (repo / "engine/two.py").read_bytes()


@pytest.mark.parametrize(
    ("by", "says", "problem"),
    [
        ("return one() + one()", "two", "no test of tests/part02/test_two.py rejects it"),
        ("return total", "two is more", "the first failure does not say 'two is more'"),
        ("return total", "assert Two().value == 2", "the first failure does not say"),  # source, not words
        ("raise ValueError('two\\n' * 30)", "two", "the failure has 30 lines; accepted: 20"),
        ("import os; os._exit(3)", "two", "pytest itself crashed"),
        ("while True: pass", "two", "pytest did not end within 3 seconds"),
    ],
    ids=["nobody", "other words", "source", "long", "crash", "endless"],
)
def test_a_rejection_that_teaches_nothing_is_a_problem(tiny, warm, monkeypatch, by, says, problem):
    monkeypatch.setattr("parts.mistakes.SECONDS", 3 if "while" in by else 600)
    _, part, tree = tiny
    mistake = Mistake("engine/two.py:Two.value", "a name", "return total + one()", says, by)
    verdict = judge(warm, tree, part, mistake)
    assert problem in str(verdict)
    assert str(verdict).startswith("engine/two.py:Two.value: 'a name': ")


@pytest.mark.parametrize("says", ["the word is two", "it is no word at all"])
def test_what_a_smaller_file_of_another_exercise_says_is_what_a_learner_is_shown(tiny, warm, says):
    """A run takes the files of all exercises, from small to large. In this one the mistake shows first,
    though its exercise does not name it.
    """
    _, part, tree = tiny
    file = "tests/part02/test_other.py"
    test = f"from engine.two import words\n\n\ndef test_it():\n    assert words() == 'two', {says!r}\n"
    write(tree, file, test)
    value, words = part.exercises
    part = replace(part, exercises=(replace(value, tests=(file, *value.tests)), words))
    assert part.test_files == (file, *words.tests)
    mistake = Mistake("engine/two.py:words", "a name", '"two"', "the word is two", '"too"')
    verdict = judge(warm, tree, part, mistake)
    assert verdict.test == f"{file}::test_it"
    assert says in verdict.says
    assert bool(verdict.problem) == ("two" not in says)


def test_a_mistake_that_breaks_the_import_is_a_problem(tiny, warm):
    _, part, tree = tiny
    test = "from engine.two import Two\n\nTwo().value.bit_length()\n\n\ndef test_two():\n    pass\n"
    write(tree, "tests/part02/test_two.py", test)
    mistake = Mistake("engine/two.py:Two.value", "a name", "return total + one()", "two", "return None")
    assert "it breaks the import of tests/part02/test_two.py" in judge(warm, tree, part, mistake).problem


@pytest.mark.parametrize(
    ("replace", "by", "problem"),
    [
        ("total = one()", "total = (", "line 15 of engine/two.py is then no Python"),
        ("one()", "1", "the text to replace stands 2 times in Two.value; accepted: once"),
        ("two()", "1", "the text to replace stands 0 times in Two.value; accepted: once"),
        ('return "two"', 'return "one"', "the text to replace stands 0 times in Two.value"),  # in another one
        ("total + one()", "(total + one())", "engine/two.py is then the same program"),
    ],
    ids=["no Python", "twice", "not at all", "elsewhere", "no change"],
)
def test_a_mistake_that_cannot_be_made_is_refused_by_name(tiny, warm, replace, by, problem):
    _, part, tree = tiny
    mistake = Mistake("engine/two.py:Two.value", "a name", replace, "two", by)
    with pytest.raises(SeriesError, match=r"engine/two\.py:Two\.value: mistake 'a name': ") as refusal:
        make(mistake, (tree / "engine/two.py").read_text())
    assert problem in str(refusal.value)
    assert problem in judge(warm, tree, part, mistake).problem


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ('engine/two.py:words"', 'engine/two.py:word"', "'engine/two.py:word': accepted"),
        ('name = "one"', 'name = ""', "mistakes[4]: name = '': accepted: str, not empty"),
        ('name = "one"', "name = 1", "mistakes[4]: name = 1: accepted: str"),
        ('name = "one"', 'name = "three"', "mistakes[5]: name = 'three' stands twice for its exercise"),
        ('says = "word"', "", "mistakes[4]: field 'says' is missing"),
        ('says = "word"', 'say = "word"', "mistakes[4]: unknown field 'say'; accepted: exercise, name, repl"),
        ("[[mistakes]]", "[[mistake]]", "unknown field 'mistake'; accepted: mistakes"),
        ("[[mistakes]]", "[mistakes]]", "not valid TOML"),
    ],
    ids=["exercise", "empty", "number", "twice", "missing", "unknown", "table", "toml"],
)
def test_a_file_that_is_wrong_is_refused_by_file_and_field(repo, before, after, problem):
    file = repo / "parts/02_two/mistakes.toml"
    head, words, tail = file.read_text().partition('[[mistakes]]\nexercise = "engine/two.py:words"')
    file.write_text(head + (words + tail).replace(before, after, 1))
    with pytest.raises(SeriesError, match=r"02_two/mistakes\.toml") as refusal:
        load_mistakes(repo, load_parts(repo)[1])
    assert problem in str(refusal.value)


def test_fewer_than_four_for_an_exercise_are_refused_by_name(repo):
    file = repo / "parts/02_two/mistakes.toml"
    file.write_text(file.read_text().rpartition("[[mistakes]]")[0])
    with pytest.raises(SeriesError, match=r"two\.py:words has 3 mistakes; accepted: 4 or more"):
        load_mistakes(repo, load_parts(repo)[1])


def test_a_part_without_the_file_is_refused(repo):
    (repo / "parts/02_two/mistakes.toml").unlink()
    with pytest.raises(SeriesError, match=re.escape("02_two/mistakes.toml is missing")):
        load_mistakes(repo, load_parts(repo)[1])


@pytest.mark.parametrize(
    ("file", "source", "code", "last"),
    [
        ("tests/part02/conftest.py", "import no_such_module\n", 4, "No module named 'no_such_module'"),
        (
            "tests/part02/test_two.py",
            "def test_two():\n    raise KeyboardInterrupt\n",
            2,
            "KeyboardInterrupt",
        ),
        (
            "tests/part02/conftest.py",
            "def pytest_collection_modifyitems():\n    raise RuntimeError('a broken hook')\n",
            3,
            "a broken hook",
        ),
    ],
    ids=["conftest", "interrupted", "internal error"],
)
def test_where_pytest_stopped_it_is_not_said_that_no_test_rejects_it(tiny, warm, file, source, code, last):
    _, part, tree = tiny
    write(tree, file, source)
    mistake = Mistake("engine/two.py:Two.value", "a name", "return total + one()", "two", "return total")
    verdict = judge(warm, tree, part, mistake)
    assert verdict.problem == f"pytest stopped with exit code {code}, and no test had failed"
    assert last in verdict.says, "its last lines"


def test_of_a_file_that_waits_for_an_exercise_one_failure_is_enough(tiny, warm):
    _, _, tree = tiny
    seen = "import pytest\n\n\n@pytest.mark.parametrize('i', range(3))\ndef test_{}(i):\n    assert {}\n"
    write(tree, "tests/part02/test_a.py", seen.format("a", "i == 0"))
    write(tree, "tests/part02/test_b.py", seen.format("b", "i < 3"))
    write(tree, "tests/part02/test_c.py", seen.format("c", "i == 7"))
    run = warm.pytest(tree, [f"tests/part02/test_{x}.py" for x in "abc"], 600, once=True)
    assert [failure.test.partition("::")[2] for failure in run.failures] == ["test_a[1]", "test_c[0]"]
    assert len(run.passed) == 1 + 3
    assert len(run.skipped) == 1 + 2
