"""Renders numbers from `benchmarks/results/*.json` into both README.md and the articles.

    python tools/render_tables.py           # rewrite in place
    python tools/render_tables.py --check   # exit 1 if a number is out of date (part of `make test`)

Two marks, both invisible in rendered Markdown. A table, with a caption naming machine and versions:
    <!-- table: RESULT.NAME --> ... <!-- /table -->
and a single figure, with an optional Python format:
    <!-- value: RESULT.figures.KEY[.KEY…] | .1f -->2.9<!-- /value -->
A RESULT may also be the data of a figure, articles/figures/RESULT.play.json, which is computed from records.
A table whose measurement needs what is not here (another engine) is marked `table?`: it may lack its file.
"""

import json
import re
import sys
from functools import cache, reduce
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks.record import cell_text  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
FIGURES = ROOT / "articles" / "figures"
TABLE = re.compile(r"(<!-- table(\??): ([\w.\-]+) -->\n)(.*?)(<!-- /table -->)", re.DOTALL)
VALUE = re.compile(r"(<!-- value: ([\w.\-]+)(?: \| (\S+))? -->)(.*?)(<!-- /value -->)", re.DOTALL)


@cache
def result(name: str) -> dict:
    """A record, or else the data of a figure to play with."""
    path = RESULTS / f"{name}.json"
    return json.loads((path if path.exists() else FIGURES / f"{name}.play.json").read_text())


def table(path: str, may_be_absent: bool = False) -> str:
    name, key = path.split(".")
    if may_be_absent and not (RESULTS / f"{name}.json").exists():
        return f"*`benchmarks/results/{name}.json` has not been measured yet.*\n"
    found = result(name)
    columns, rows = found["tables"][key]["columns"], found["tables"][key]["rows"]
    right = [not any(isinstance(row[i], str) for row in rows) for i in range(len(columns))]
    lines = [columns, ["---:" if numeric else "---" for numeric in right], *rows]
    text = "\n".join("| " + " | ".join(cell_text(cell) for cell in line) + " |" for line in lines)
    machine, versions = found["machine"], found["versions"]
    threads = found["workload"].get("torch_threads", machine["torch_threads"])  # several: each was tried
    threads = " and ".join(map(str, threads)) if isinstance(threads, list) else threads
    where = machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores, {threads} torch threads"
    what = ", ".join(f"{package} {number}" for package, number in versions.items())
    return (
        f"{text}\n\n*Measured {found['date']} on {where}; {what}. From `benchmarks/results/{name}.json`.*\n"
    )


def value(path: str, spec: str | None) -> str:
    name, *keys = path.split(".")
    found = reduce(
        lambda node, key: node[int(key)] if isinstance(node, list) else node[key], keys, result(name)
    )
    return format(found, spec or "")


def render(text: str) -> str:
    """A mark at the beginning of a line ends the paragraph there: Markdown takes that line for HTML.

    Raises ValueError for a mark that is none, and would stay as it is for ever.
    """
    known = {match.start() for match in (*VALUE.finditer(text), *TABLE.finditer(text))}
    for mark in re.finditer(r"<!-- (value|table\??): .*", text):
        if mark.start() not in known:
            raise ValueError(f"this mark is not one: {mark[0][:120]}")
    text = re.sub(r"(?<=[^\n])\n(?=<!-- value: )", " ", text)
    text = TABLE.sub(lambda m: m[1] + table(m[3], m[2] == "?") + m[5], text)
    return VALUE.sub(lambda m: m[1] + value(m[2], m[3]) + m[5], text)


def main() -> int:
    stale = []
    for path in [
        ROOT / "README.md",
        ROOT / "benchmarks" / "README.md",
        *sorted((ROOT / "articles").glob("*.md")),
        *sorted(ROOT.glob("engine/zoo/*/README.md")),
    ]:
        before = path.read_text()
        after = render(before)
        if before != after:
            stale.append(path.relative_to(ROOT))
            if "--check" not in sys.argv:
                path.write_text(after)
    for path in stale:
        print(f"{path}: {'out of date' if '--check' in sys.argv else 'rendered'}")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
