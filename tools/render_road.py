"""Renders what the manifests say of the parts into README.md and articles/course.md.

    python tools/render_road.py           # rewrite in place
    python tools/render_road.py --check   # exit 1 if a block is out of date (part of `make test`)

Two marks, both invisible in rendered Markdown. A block, which is the table of all parts or one of PLANS:
    <!-- road: NAME --> ... <!-- /road -->
and hours, the sum of the minutes of some parts:
    <!-- hours: 1-3, 8 -->6<!-- /hours -->
"""

import posixpath
import re
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from parts.manifest import Number, Part, load_parts  # noqa: E402

PAGES = ("README.md", "articles/course.md")
BLOCK = re.compile(r"(<!-- road: ([\w ]+) -->\n)(.*?)(<!-- /road -->)", re.DOTALL)
HOURS = re.compile(r"(<!-- hours: ([\w, -]+) -->)([^<]*)(<!-- /hours -->)")


@dataclass(frozen=True)
class Week:
    """A week of a plan: the parts that are worked through, and what else there is to do."""

    parts: str = ""  # as `chosen` reads them
    choose_one: bool = False  # of these parts, one
    more: str = ""


PLANS = {
    "six weeks": (
        Week("1-3"),
        Week("4-6"),
        Week("7-10"),
        Week("11-13"),
        Week("14-17"),
        Week("18-20"),
    ),
    "twelve weeks": (
        Week("1-2"),
        Week("3-4"),
        Week("5-6"),
        Week("7-8"),
        Week("9-11"),
        Week("12", more="choose a project"),
        Week("13"),
        Week("14-15", more="a page: what the project changes, and how it will be measured"),
        Week("16-17"),
        Week("18-20"),
        Week("A-C", choose_one=True, more="the project runs"),
        Week(more="the project, its tests and its measurement; ten minutes to show it"),
    ),
}


def chosen(text: str, parts: list[Part]) -> list[Part]:
    """The parts of `1-3, 8`, in the order of the series. Raises ValueError for a part that is not here."""
    wanted: set[Number] = set()
    by_number = {part.number: part for part in parts}
    for piece in filter(None, map(str.strip, text.split(","))):
        first, _, last = piece.partition("-")
        run = range(Number.read(first), Number.read(last or first) + 1)
        wanted |= set(map(Number, run))
    if missing := wanted - by_number.keys():
        raise ValueError(f"{text!r}: no part {min(missing)}; here are {', '.join(map(str, by_number))}")
    return [part for part in parts if part.number in wanted]


def hours(parts: list[Part]) -> str:
    """The sum of their minutes in hours, to the nearest half."""
    return f"{(sum(part.minutes for part in parts) + 15) // 30 / 2:g}"


def table_of_parts(parts: list[Part], page: str) -> str:
    """A row per part: its topic, what one can do after it, how long and how hard it is, what it builds on."""
    rows = [
        "| part | topic | after it | minutes | exercises | needs |",
        "| ---: | --- | --- | ---: | --- | --- |",
    ]
    for part in parts:
        article, notebook = (
            _link(target, page) for target in (f"articles/{part.name}.md", f"notebooks/{part.name}.ipynb")
        )
        stars = " ".join("★" * exercise.grade for exercise in part.exercises if exercise.grade)
        cells = (
            str(part.number),
            f"[{part.title}]({article}), [notebook]({notebook})",
            part.capability,
            str(part.minutes),
            stars,
            _runs(part.needs),
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def plan(weeks: tuple[Week, ...], parts: list[Part], page: str) -> str:
    """A row per week: its parts, their hours, and how many functions are handed in."""
    rows = ["| week | parts | hours | handed in |", "| ---: | --- | ---: | --- |"]
    for number, week in enumerate(weeks, 1):
        here = chosen(week.parts, parts)
        names = [f"{p.number} [{p.title}]({_link(f'articles/{p.name}.md', page)})" for p in here]
        counts = [len(part.exercises) for part in here]
        if week.choose_one:
            names, time = ["one of " + " · ".join(names)], hours([max(here, key=lambda part: part.minutes)])
            work = f"{min(counts)} to {max(counts)} functions"
        else:
            time = hours(here) if here else ""
            work = f"{sum(counts)} functions" if here else ""
        handed_in = "; ".join(filter(None, [work, week.more]))
        rows.append(f"| {number} | {' · '.join(names)} | {time} | {handed_in} |")
    return "\n".join(rows) + "\n"


def render(text: str, page: str, parts: list[Part]) -> str:
    """`text`, which stands at `page`, with its marks filled. Raises ValueError for a mark that is none."""
    known = {match.start() for match in (*BLOCK.finditer(text), *HOURS.finditer(text))}
    for mark in re.finditer(r"<!-- (road|hours): .*", text):
        if mark.start() not in known:
            raise ValueError(f"{page}: this mark is not one: {mark[0][:120]}")
    text = BLOCK.sub(lambda found: found[1] + _block(found[2], page, parts) + found[4], text)
    return HOURS.sub(lambda found: found[1] + hours(chosen(found[2], parts)) + found[4], text)


def _block(name: str, page: str, parts: list[Part]) -> str:
    if name == "parts":
        return table_of_parts(parts, page)
    if name in PLANS:
        return plan(PLANS[name], parts, page)
    raise ValueError(f"{page}: no block {name!r}; accepted: parts, {', '.join(PLANS)}")


def _link(target: str, page: str) -> str:
    return posixpath.relpath(target, posixpath.dirname(page) or ".")


def _runs(numbers: tuple[Number, ...]) -> str:
    """`1, 2, 5, 6, 7` as `1, 2, 5 to 7`."""
    runs: list[list[Number]] = [[number] for number in numbers[:1]]
    for before, number in pairwise(numbers):
        if number == before + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def main() -> int:
    parts = [part for part in load_parts(ROOT) if part.landed]
    stale = []
    for page in PAGES:
        before = (ROOT / page).read_text(encoding="utf-8")
        after = render(before, page, parts)
        if before != after:
            stale.append(page)
            if "--check" not in sys.argv:
                (ROOT / page).write_text(after, encoding="utf-8")
    for page in stale:
        print(
            f"{page}: {'out of date: python tools/render_road.py' if '--check' in sys.argv else 'rendered'}"
        )
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
