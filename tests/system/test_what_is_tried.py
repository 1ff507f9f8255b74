"""CONTRIBUTING's list of what is tried says how many requests the tests make, and that none may be wrong."""

import pytest

from tests.system import test_adapter_storm as adapters
from tests.system import test_crowd as crowd
from tests.system import test_fuzz as fuzz
from tests.system import test_soak as soak
from tests.system import test_storm as storm
from tests.system.ready import ROOT

HEAD = "| who means what | requests | wrong | left behind | judged by | test |\n"
A_CROWD = f"{crowd.ASKED}, and {crowd.LEAVERS} who leave"
REQUESTS = {  # how a row begins -> the requests of its test
    "bodies no program would write": f"{fuzz.DRAWN:,}",
    "a crowd on drafts": A_CROWD,
    "the same in int8": A_CROWD,
    "one adapter's name": f"{adapters.SWAPPED_ASKS}, and {adapters.SWAPPED_ASKS}",
    "twenty who load": f"{adapters.ADMINS * adapters.CHANGES} and {adapters.ASKERS * adapters.ASKS}, twice",
    "a hundred users": f"{2 * (storm.USERS + storm.LEAVERS)}",
    "clients of every kind": f"{soak.CLIENTS * soak.VISITS} visits",
}


@pytest.fixture(scope="module")
def rows() -> list[list[str]]:
    """The cells of each row."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition(HEAD)[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[1:]]


@pytest.mark.parametrize("begins", REQUESTS)
def test_a_row_has_the_numbers_of_its_test(rows, begins):
    (found,) = [cells[1:4] for cells in rows if cells[0].startswith(begins)]
    assert found == [REQUESTS[begins], "0", "0"], "requests, wrong, left behind"


def test_each_file_of_the_list_is_there(rows):
    assert len(rows) == len(REQUESTS) + 2, "schemathesis and hostile connections count their own"
    for *_, files in rows:
        for file in files.split(", "):
            assert list((ROOT / "tests").glob(file.strip("`"))), file
    assert len(fuzz.ROUTES) == 8, "on eight routes"
