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
