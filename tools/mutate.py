"""Would a test notice? Changes one operator, comparison, number or truth value in a part's own engine files
at a time, and asks the part's tests. What none of them notices is printed with file, line and difference.

    python tools/mutate.py 5                     # ten changes, drawn with seed 0
    python tools/mutate.py 5 --count 30 --seed 7
    python tools/mutate.py 5 --file engine/decoding/sampling.py

A survivor is a test that is missing, or a change that changes nothing. The part's solved tree is cut into a
temporary folder, and only that is changed. The exit code is 1 if one survives.
"""

import argparse
import ast
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from parts.manifest import Part, find_part, load_parts, matches  # noqa: E402
from parts.mistakes import UP_TO_THE_FIRST, written  # noqa: E402
from parts.tree import source_files, start  # noqa: E402
from parts.warm import Warm  # noqa: E402

SWAPS: dict[type[ast.AST], tuple[str, str]] = {  # what stands there, and what comes in its place
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}
SECONDS = 60  # a run may take this and ten times as long as the unchanged one, before it counts as endless
LONGEST = 3600  # that the unchanged one may take


@dataclass(frozen=True)
class Mutation:
    """One change of a source: `by` in the place of the characters from `begin` to `end`."""

    line: int
    begin: int
    end: int
    by: str

    def apply(self, source: str) -> str:
        return source[: self.begin] + self.by + source[self.end :]


def mutations(source: str) -> list[Mutation]:
    """All changes of the functions in a file, in the order of the source, each of which Python can read.

    Annotations, decorators, docstrings and what stands in an f-string are left as they are.
    """
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def place(line: int, column: int) -> int:
        """The character at a place that `ast` tells: a line from 1, and a column in bytes."""
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    def begin(node: ast.expr) -> int:
        return place(node.lineno, node.col_offset)

    def end(node: ast.expr) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return place(node.end_lineno, node.end_col_offset)

    found = []

    def swap(operator: ast.AST, after: int, before: int, assigns: str = "") -> None:
        """Change the operator that stands somewhere between two places. `assigns`: "=" in x += 1."""
        old, new = (text and text + assigns for text in SWAPS.get(type(operator), ("", "")))
        pattern = rf"(?<![\w<>=!*/]){re.escape(old)}(?![\w<>=*/])"
        if old and (there := re.search(pattern, source[after:before])):
            at = after + there.start()
            line = source.count("\n", 0, at) + 1
            found.append(Mutation(line, at, after + there.end(), new))

    for node in _computing(ast.parse(source)):
        match node:
            case ast.Compare(left=left, ops=operators, comparators=others):
                for operator, a, b in zip(operators, [left, *others], others):
                    swap(operator, end(a), begin(b))
            case ast.BinOp(left=left, op=operator, right=right):
                swap(operator, end(left), begin(right))
            case ast.AugAssign(target=target, op=operator, value=value):
                swap(operator, end(target), begin(value), "=")
            case ast.BoolOp(op=operator, values=values):
                swap(operator, end(values[0]), begin(values[1]))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                found.append(Mutation(node.lineno, begin(node), begin(operand), ""))
            case ast.Constant(value=bool(value)):
                found.append(Mutation(node.lineno, begin(node), end(node), str(not value)))
            case ast.Constant(value=int(value) | float(value)):
                found.append(Mutation(node.lineno, begin(node), end(node), repr(value + 1)))
    return sorted((each for each in found if _is_another(source, each)), key=lambda each: each.begin)


def _computing(module: ast.Module) -> Iterator[ast.AST]:
    """Every node in a function that computes something."""
    waiting: list[tuple[ast.AST, bool]] = [(module, False)]
    while waiting:
        node, inside = waiting.pop()
        if inside:
            yield node
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "returns", "decorator_list"):
                children = value if isinstance(value, list) else [value]
                kept = (c for c in children if isinstance(c, ast.AST) and not isinstance(c, ast.JoinedStr))
                waiting += [(child, inside) for child in kept]


def _is_another(source: str, mutation: Mutation) -> bool:
    """Whether the changed source is Python, and another program."""
    try:
        changed = ast.parse(mutation.apply(source))
    except SyntaxError:
        return False
    return ast.dump(changed) != ast.dump(ast.parse(source))


def own_files(root: Path, part: Part) -> list[str]:
    """The part's Python files in engine/, but for the contracts of rooms."""
    own = (f for f in source_files(root) if f.endswith(".py") and any(matches(f, p) for p in part.adds))
    return [file for file in own if file.startswith("engine/") and not file.endswith("__init__.py")]


def drawn(tree: Path, files: list[str], count: int, random: Random) -> list[tuple[str, Mutation]]:
    """At most `count` (file, mutation) of the files' in `tree`."""
    every = [
        (file, mutation)
        for file in files
        for mutation in mutations((tree / file).read_text(encoding="utf-8"))
    ]
    return random.sample(every, min(count, len(every)))


def judge(warm: Warm, tree: Path, part: Part, file: str, mutation: Mutation, seconds: float) -> str:
    """Who noticed it: a test, or what ended the run before a test; empty: nobody."""
    changed = mutation.apply((tree / file).read_text(encoding="utf-8"))
    with written(tree, file, changed):
        run = warm.pytest(tree, [part.tests, *UP_TO_THE_FIRST], seconds, _data())
    if run.problem or run.failures:
        return run.problem or run.failures[0].test
    return "" if run.passed else "pytest ran no test"  # there was nothing to run


def _data() -> dict[str, str]:
    """Where the corpora and GPT-2's vocabulary are, if this process has been told."""
    return {key: value for key, value in os.environ.items() if key == "RUVON_DATA"}


def difference(tree: Path, file: str, mutation: Mutation) -> str:
    """The changed line, before and after."""
    source = (tree / file).read_text(encoding="utf-8")
    lines = unified_diff(source.splitlines(), mutation.apply(source).splitlines(), n=0, lineterm="")
    return "\n".join(f"    {line}" for line in list(lines)[3:])


def survivors(warm: Warm, root: Path, part: Part, files: list[str], count: int, seed: int) -> int:
    """Make `count` changes in the part's `files`, and print what becomes of each: how many survive.

    Exits with a word if the tests fail before anything is changed.
    """
    survived = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "solved"
        start(root, part.number, tree, solved=True)
        unchanged = warm.pytest(tree, [part.tests, *UP_TO_THE_FIRST], LONGEST, _data())
        if unchanged.problem or unchanged.failures:
            sys.exit(f"the tests fail as it is: {unchanged.problem or unchanged.failures[0].test}")
        print(f"{len(unchanged.passed)} tests pass in {unchanged.seconds:.0f} s", flush=True)
        seconds = SECONDS + 10 * unchanged.seconds
        for file, mutation in drawn(tree, files, count, Random(seed)):
            noticed = judge(warm, tree, part, file, mutation, seconds)
            survived += not noticed
            print(f"{file}:{mutation.line}: {noticed or 'SURVIVES'}", flush=True)
            if not noticed:
                print(difference(tree, file, mutation), flush=True)
    return survived


def main(arguments: list[str]) -> int:
    """The command: how many survive."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("part", help="5, say, or A")
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--file", help="of this file of the part's alone")
    given = parser.parse_args(arguments)
    part = find_part(load_parts(ROOT), given.part)
    files = own_files(ROOT, part)
    if given.file and given.file not in files:
        parser.error(f"--file {given.file}: accepted: {', '.join(files)}")
    with Warm() as warm:
        return survivors(warm, ROOT, part, [given.file] if given.file else files, given.count, given.seed)


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
