"""What a manifest may say, and which functions can be exercises, on the tiny repository."""

import ast
from pathlib import Path

import pytest

from parts.manifest import Exercise, Number, Part, SeriesError, load_parts
from parts.stubs import is_stub, stub

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("minutes = 5", "minute = 5", "unknown field 'minute'"),
        ("minutes = 5", "", "field 'minutes' is missing"),
        ('slug = "one"', 'slug = "won"', "'01_won', the folder is '01_one'"),
        ("landed = true", "landed = true\nneeds = [1]", "accepted are parts before 1"),
        ("minutes = 5", 'minutes = "5"', "minutes = '5': accepted: int"),
        ("tests = [", "grade = 4\ntests = [", "grade = 4: accepted: 1 to 3"),
        ("engine/one.py:one", "engine/two.py:one", "not in a file that the part adds"),
        ("number = 1", "number = ", "not valid TOML"),
    ],
)
def test_a_manifest_that_is_wrong_is_refused_by_file_and_field(repo, before, after, message):
    manifest = repo / "parts/01_one/part.toml"
    manifest.write_text(manifest.read_text().replace(before, after))
    with pytest.raises(SeriesError, match=r"01_one/part.toml") as refusal:
        load_parts(repo)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    "source",
    ["class f:\n    '''A class.'''\n    x = 1\n", "def f(): return 1\n", "def f():\n    '''Only words.'''\n"],
)
def test_only_a_function_with_a_body_on_its_own_lines_can_be_an_exercise(source):
    with pytest.raises(SeriesError, match="the exercise 'f'"):
        stub(source, {"f": "Part 1: write f"}, "f.py")


def test_an_exercise_without_a_docstring_keeps_its_signature():
    cut = stub(
        "def f(\n    x,\n):\n    # first\n    y = x\n    return y\n\n\nz = 1\n",
        {"f": "Part 1: write f"},
        "f.py",
    )
    assert (
        cut
        == 'def f(\n    x,\n):\n    # first\n    raise NotImplementedError("Part 1: write f")\n\n\nz = 1\n'
    )


@pytest.mark.parametrize("words", ['say "f", \\ and f again', "say the word's name", "say it"])
def test_an_exercise_counts_as_written_once_it_no_longer_raises(words):
    source = "async def f(x):\n    '''Words.'''\n    return x\n"
    cut = stub(source, {"f": f"Part 1: {words}"}, "f.py")
    assert is_stub(cut, "f", "f.py")
    assert is_stub(stub(source, {"f": f"Extension A: {words}"}, "f.py"), "f", "f.py")
    assert not is_stub(source, "f", "f.py")
    announcement = ast.parse(cut).body[0].body[-1].exc.args[0]
    assert ast.literal_eval(announcement) == f"Part 1: {words}"


@pytest.mark.parametrize(
    "shown", ["NotImplementedError: {}", 'raise NotImplementedError("{}")', "NotImplementedError('{}')"]
)
def test_an_open_exercise_is_recognised_as_python_and_as_triton_show_it(shown):
    one, two = (Exercise(f"engine/a.py:{name}", f"write {name}", ()) for name in ("one", "two"))
    part = Part(Number(3), "a", "A", "A", "a", 1, True, exercises=(one, two))
    assert part.announced("E   " + shown.format("Part 3: write two")) == two
    assert part.announced("E   " + shown.format("Part 4: write two")) is None
    assert part.announced("AssertionError: Part 3: write two") is None


def part_of(*tests: str) -> Part:
    """With an exercise for each of these, whose files they name."""
    exercises = (Exercise(f"a.py:f{i}", "write it", tuple(files.split())) for i, files in enumerate(tests))
    return Part(Number(1), "a", "A", "An A", "a", 1, True, exercises=tuple(exercises))


def test_a_run_takes_all_examples_by_hand_first_and_a_file_of_several_exercises_last():
    part = part_of("turn rope model rows", "norm model", "heads model rows")
    assert part.test_files == ("turn", "norm", "heads", "rope", "model", "rows")


@pytest.mark.parametrize("part", load_parts(ROOT), ids=lambda part: part.name)
def test_a_run_keeps_the_order_of_each_exercises_list(part):
    """Else the failure that a learner is shown first is not the one that parts/mistakes.py looks at."""
    for exercise in part.exercises:
        in_a_run = [path for path in part.test_files if path in exercise.tests]
        assert in_a_run == list(exercise.tests), f"{exercise.where}: another list turns it round"
