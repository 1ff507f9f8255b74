"""tools/mutate.py: which changes there are, and which of them the tests of the tiny repository notice."""

from pathlib import Path
from random import Random

import pytest

from parts.manifest import load_parts
from tests.series.tiny import contents, write
from tools import mutate
from tools.mutate import drawn, mutations, own_files, survivors

SOURCE = '''
"""1 < 2."""

from dataclasses import dataclass

LIMIT = 5


@dataclass(frozen=True)
class Ünder:
    limit: int | None = 3

    def fits(self, number: int | None, *, strict: bool = False) -> bool:
        """Whether 1 < 2."""
        if not strict and number is None:
            return True
        words = f"{number + 1} for the künstler"; least = number * 2 - 1
        return (least) <= self.limit != len(words) // 4
'''


def test_every_operator_number_and_truth_value_of_a_function_can_be_changed():
    lines = SOURCE.splitlines()
    changes = [
        (each.line, each.apply(SOURCE).splitlines()[each.line - 1].strip()) for each in mutations(SOURCE)
    ]
    assert changes == [
        (13, "def fits(self, number: int | None, *, strict: bool = True) -> bool:"),
        (15, "if strict and number is None:"),
        (15, "if not strict or number is None:"),
        (15, "if not strict and number is not None:"),
        (16, "return False"),
        (17, lines[16].strip().replace("* 2", "/ 2")),
        (17, lines[16].strip().replace("* 2", "* 3")),
        (17, lines[16].strip().replace("- 1", "+ 1")),
        (17, lines[16].strip().replace("- 1", "- 2")),
        (18, "return (least) < self.limit != len(words) // 4"),
        (18, "return (least) <= self.limit == len(words) // 4"),
        (18, "return (least) <= self.limit != len(words) * 4"),
        (18, "return (least) <= self.limit != len(words) // 5"),
    ]


def asked(warm, repo: Path, count: int = 100, seed: int = 0) -> int:
    part = load_parts(repo)[1]
    return survivors(warm, repo, part, own_files(repo, part), count, seed)


def test_what_no_test_notices_is_named_and_the_repository_is_left_as_it_was(warm, repo, capsys):
    """Nobody asks the tiny Part 2 for its half."""
    before = contents(repo)
    assert asked(warm, repo) == 2
    said = capsys.readouterr().out
    assert "    -    def half(self) -> float: return self.value / 2\n" in said
    assert "    +    def half(self) -> float: return self.value * 2\n" in said
    assert "    +    def half(self) -> float: return self.value / 3\n" in said
    assert said.count("SURVIVES") == 2
    assert "engine/two.py:17: tests/part02/test_two.py::test_two_is_two\n" in said
    assert contents(repo) == before


def test_a_change_that_never_ends_is_noticed(warm, repo, capsys, monkeypatch):
    monkeypatch.setattr(mutate, "SECONDS", 3)
    loop = "number = 3\n        while number > 0:\n            number -= 1\n        total = one()\n"
    two = repo / "engine/two.py"
    two.write_text(two.read_text().replace("total = one()\n", loop))
    asked(warm, repo)
    assert "engine/two.py:17: pytest did not end within" in capsys.readouterr().out


def test_the_same_seed_draws_the_same_changes(repo):
    every = [("engine/two.py", each) for each in mutations((repo / "engine/two.py").read_text())]
    assert len(every) == 3
    draws = [drawn(repo, ["engine/two.py"], 2, Random(seed)) for seed in (*range(9), 0)]
    assert draws[0] == draws[-1]
    assert all(set(draw) < set(every) for draw in draws)
    assert len(set(map(frozenset, draws))) == 3


def test_a_part_whose_tests_fail_as_they_are_is_refused(warm, repo):
    write(repo, "engine/two.py", (repo / "engine/two.py").read_text().replace('"two"', '"three"'))
    with pytest.raises(SystemExit, match=r"fail as it is: tests/part02/test_two\.py::test_two_has_a_word"):
        asked(warm, repo)


def test_a_change_with_which_no_test_can_be_read_is_noticed(warm, repo, capsys):
    write(repo, "tests/part02/conftest.py", "from engine.two import Two\n\nassert Two().value == 2\n")
    asked(warm, repo)
    said = "engine/two.py:17: pytest stopped with exit code 4, and no test had failed\n"
    assert said in capsys.readouterr().out
