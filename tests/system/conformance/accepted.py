"""The deviations from vLLM that are meant, each with its reason: accepted.toml, and the page made of it."""

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from tests.system.conformance.differences import Difference

FILE = Path(__file__).with_name("accepted.toml")
PAGE = FILE.parents[3] / "articles" / "differs_from_vllm.md"
GROUPS = {
    "better": "What we do differently because we think it better",
    "refused": "What is refused by name",
    "absent": "What is not here",
}
BRACKETS = str.maketrans("[]", "()")  # fnmatch gives the square ones a meaning
HEAD = """# What differs from vLLM

{cases} requests were sent to a real vLLM 0.32 (its build for CPUs), and are sent to `ruvon serve` at each
change of this repository, both with storyteller in float32. What is not in the tables below is the same: the
status, every key, and for greedy requests every text, token, log probability (to 0.001), reason and count.

The offline API's table is in [examples/README.md](../examples/README.md). This page is made from
[accepted.toml](../tests/system/conformance/accepted.toml) by `python -m tests.system.conformance page`; a
test fails if something else differs, or if what is listed no longer does.
"""


@dataclass(frozen=True)
class Deviation:
    """What may differ, at which places, and why. A place is (case, what, where): patterns in which `*` stands
    for anything, and `[]` for each index of a list; `what` may name several kinds, as in "null|value".
    """

    topic: str
    group: str
    vllm: str
    ours: str
    reason: str
    places: tuple[tuple[str, str, str], ...]

    def place_of(self, found: Difference) -> tuple[str, str, str] | None:
        """The place that covers the difference, or None."""
        return next((place for place in self.places if _matches(found, *place)), None)


def _matches(found: Difference, case: str, what: str, where: str) -> bool:
    return (
        fnmatchcase(found.case, case)
        and found.what in what.split("|")
        and fnmatchcase(found.where.translate(BRACKETS), where.replace("[]", "[*]").translate(BRACKETS))
    )


def read(file: Path = FILE) -> list[Deviation]:
    entries = tomllib.loads(file.read_text())["deviation"]
    return [Deviation(**entry | {"places": tuple(map(tuple, entry["places"]))}) for entry in entries]


def unexpected(found: Iterable[Difference], accepted: list[Deviation]) -> list[Difference]:
    return [one for one in found if not any(deviation.place_of(one) for deviation in accepted)]


def page(accepted: list[Deviation], cases: int) -> str:
    parts = [HEAD.format(cases=cases)]
    for group, title in GROUPS.items():
        rows = [
            f"| {one.topic} | {one.vllm} | {one.ours} | {one.reason} |"
            for one in accepted
            if one.group == group
        ]
        table = ["| | vLLM 0.32 | here | why |", "| --- | --- | --- | --- |", *rows]
        parts.append(f"## {title}\n\n" + "\n".join(table) + "\n")
    return "\n".join(parts)
