"""On a step's way capabilities compose: no part reaches for what another one has not written down.

Each rule is of the source alone. `breaches` names the line and the rule that it breaks.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEPS_WAY = ("requests", "cache", "execution", "scheduling", "lora", "speculation", "core", "parallel")
BY_NAME = "an interface that nobody wrote down, by getattr or hasattr"
BORROWED = "a method borrowed from another class"
PAST_PARENT = "another class's method, past one's own parent"
BY_ADDRESS = "meaning by a tensor's address"


def breaches(source: str) -> list[tuple[int, str]]:
    """(line, rule) of what breaks a rule."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Name("getattr" | "hasattr"), args=[_, ast.Constant(), *_]):
                found.append((node.lineno, BY_NAME))
            case ast.Call(func=ast.Attribute(value=ast.Name(owner)), args=[ast.Name("self"), *_]):
                if owner[0].isupper():
                    found.append((node.lineno, PAST_PARENT))
            case ast.Call(func=ast.Attribute(attr="data_ptr")):
                found.append((node.lineno, BY_ADDRESS))
            case ast.ClassDef():
                found += [(inner.lineno, BORROWED) for inner in node.body if _is_borrowed(inner)]
    return found


def _is_borrowed(statement: ast.stmt) -> bool:
    """`choose = GraphForward.choose` in the body of a class."""
    match statement:
        case ast.Assign(value=ast.Attribute(value=ast.Name(owner))):
            return owner[0].isupper()
    return False


@pytest.mark.parametrize("room", STEPS_WAY)
def test_nothing_on_a_steps_way_reaches_past_what_is_written_down(room):
    files = sorted((ROOT / "engine" / room).glob("*.py"))
    assert files, f"engine/{room} has gone: take it out of STEPS_WAY"
    found = [(path.name, *breach) for path in files for breach in breaches(path.read_text(encoding="utf-8"))]
    assert found == []


@pytest.mark.parametrize(
    ("code", "rule"),
    [
        ("choose = getattr(forward, 'choose', sample_batch)", BY_NAME),
        ("if hasattr(forward, 'last'): pass", BY_NAME),
        ("class Rows:\n    choose = GraphForward.choose", BORROWED),
        ("class R(A):\n    def submit(self, batch): return ScoringExecutor.submit(self, batch)", PAST_PARENT),
        ("same = token_ids.data_ptr() == chosen.data_ptr()", BY_ADDRESS),
    ],
)
def test_what_was_there_once_is_caught(code, rule):
    """As the engine had it, on the way of each step."""
    assert {found for _, found in breaches(code)} == {rule}


def test_what_only_looks_like_it_is_fine():
    code = """
class A(B):
    names = FIELDS
    empty = dict()

    def submit(self, batch):
        value = getattr(self, spec.name)
        return super().submit(batch, Batch.of(self.rows), table.write(self))
"""
    assert breaches(code) == []
