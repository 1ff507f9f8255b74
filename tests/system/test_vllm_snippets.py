"""What users of vLLM write offline, with another import and another model: it runs, or is refused in words.

`snippets.py` lists them. `examples/README.md` shows the list as a table, which
`python -m tests.system.test_vllm_snippets` writes anew.
"""

import re
from pathlib import Path

import pytest

import engine
from engine import LLM
from tests.system.snippets import SETTING, SNIPPETS

README = Path(__file__).parents[2] / "examples/README.md"
BEGIN, END = "<!-- snippets -->", "<!-- /snippets -->"


def table() -> str:
    """SNIPPETS as a table in Markdown."""
    rows = [
        f"| {each.shown} | {'refused: ' + _why(each.refusal) if each.refusal else 'runs as it is'} |"
        for each in SNIPPETS
    ]
    return "\n".join(["| what a script does | here |", "| --- | --- |", *rows])


def _why(refusal: str) -> str:
    """The reason at the end of an error's words; those of a field that is unknown are its name alone."""
    return refusal.rpartition(": ")[2] if ": " in refusal else f"{refusal} is no field here"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("storyteller")


@pytest.mark.parametrize("snippet", SNIPPETS, ids=str)
def test_a_vllm_users_snippet_runs_or_is_refused_in_words(llm, snippet):
    names: dict = {"llm": llm}
    exec(SETTING, names)
    if snippet.refusal:
        with pytest.raises(
            (ValueError, TypeError, AttributeError, ImportError), match=re.escape(snippet.refusal)
        ):
            exec(snippet.code, names)
        return
    exec(snippet.code, names)
    assert eval(snippet.holds, names), snippet.holds


def test_the_table_of_the_examples_is_these_snippets():
    shown = README.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip()
    assert shown == table(), "python -m tests.system.test_vllm_snippets writes it"


def test_an_absent_method_is_no_attribute_and_says_why_once():
    absent = [name for name in engine.wiring.llm_absent.ABSENT if hasattr(LLM, name)]
    assert not absent, "a method that is there is in the list of absent ones"


if __name__ == "__main__":
    before, begin, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    README.write_text(f"{before}{begin}\n{table()}\n{end}{after}", encoding="utf-8")
