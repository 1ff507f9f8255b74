"""Numbers in texts come from results, by marks; a misspelt mark would keep its old number for ever."""

import pytest

from tools.render_tables import render

GOOD = "takes <!-- value: part13_engine.workload.context -->0<!-- /value --> tokens"


def test_a_mark_is_given_its_number():
    assert render(GOOD) == GOOD.replace(">0<", ">512<")


@pytest.mark.parametrize("bad", ["part13_engine.workload, context", "part13_engine.workload.context | , d"])
def test_a_mark_that_is_none_is_refused(bad):
    with pytest.raises(ValueError, match="this mark is not one"):
        render(GOOD.replace("part13_engine.workload.context", bad))


TABLE = "<!-- table?: {} -->\nold\n<!-- /table -->"


def test_a_table_that_may_lack_its_file_says_so():
    shown = render(TABLE.format("no_such_result.race"))
    assert "`benchmarks/results/no_such_result.json` has not been measured yet" in shown
    assert "old" not in shown


def test_a_table_that_may_lack_its_file_is_shown_once_the_file_is_there():
    shown = render(TABLE.format("part13_engine.step"))
    assert "| sequences |" in shown
    assert "has not been measured" not in shown
    assert render(shown) == shown, "rendered twice, the same"


def test_a_table_without_its_file_is_refused_unless_its_mark_allows_it():
    with pytest.raises(FileNotFoundError):
        render(TABLE.format("no_such_result.race").replace("table?", "table"))
