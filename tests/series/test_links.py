"""Every link in every text of the repository leads to a file that git keeps, and to a heading that is there.

test_checks.py wants more of articles and notebooks: that what they link to is in their own part's tree.
"""

import re
from functools import cache
from itertools import pairwise
from pathlib import Path, PurePosixPath

import pytest

from parts.manifest import load_parts
from parts.tree import source_files
from tests.series.checks import _normal, _prose

ROOT = Path(__file__).resolve().parents[2]
FILES = source_files(ROOT)
THERE = set(FILES) | {str(parent) for path in FILES for parent in PurePosixPath(path).parents}
LINK = re.compile(r"\]\(([^)\s]+)\)|<(?:img|source)[^>]+src(?:set)?=\"([^\"]+)\"")
FENCE = re.compile(r"^(```+).*?^\1\s*$", re.DOTALL | re.MULTILINE)


@cache
def headings(path: str) -> set[str]:
    """As GitHub makes anchors of them: in small letters, without signs, with - for blanks."""
    found = re.findall(r"^#+ (.+)$", FENCE.sub("", _prose(ROOT, path)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in found}


def dead(path: str, text: str) -> list[str]:
    """What is wrong with the links of a text that stands at `path`."""
    found = []
    for link in (a or b for a, b in LINK.findall(FENCE.sub("", text))):
        target, _, anchor = link.partition("#")
        if re.match(r"\w+:", target):
            continue
        place = _normal(PurePosixPath(path).parent / target) if target else path
        if place not in THERE:
            found.append(f"{path}: links to {link}, which is not there")
        elif anchor and place.endswith(".md") and anchor not in headings(place):
            found.append(f"{path}: links to {link}, and no heading of it is #{anchor}")
    return found


@pytest.mark.parametrize("path", [path for path in FILES if path.endswith((".md", ".ipynb"))])
def test_links_lead_somewhere(path):
    assert dead(path, _prose(ROOT, path)) == []


@pytest.mark.parametrize(
    "part", [part for part in load_parts(ROOT) if part.landed], ids=lambda part: part.name
)
def test_the_road_in_the_readme_leads_to_each_article_and_notebook(part):
    links = {a or b for a, b in LINK.findall(_prose(ROOT, "README.md"))}
    assert {f"articles/{part.name}.md", f"notebooks/{part.name}.ipynb"} <= links


def test_a_dead_link_and_a_dead_anchor_are_found():
    good = (
        "[1](01_tokenizer_and_forward.md#notation) [code](../engine/wiring/llm.py) "
        '<img src="figures/01_road.svg"> <source srcset="figures/01_road.svg">'
    )
    assert dead("articles/x.md", good) == []
    bad = '<source media="x" srcset="nowhere.png"> <img alt="x" src="nowhere.svg"> '
    assert len(dead("articles/x.md", bad)) == 2
    bad = "[a](nowhere.md) [b](01_tokenizer_and_forward.md#nowhere) [c](#nowhere)"
    assert [found.split()[3] for found in dead("articles/glossary.md", bad)] == [
        "nowhere.md,",
        "01_tokenizer_and_forward.md#nowhere,",
        "#nowhere,",
    ]


ROAD = [part for part in load_parts(ROOT) if part.landed]


@pytest.mark.parametrize(("part", "following"), list(pairwise(ROAD)), ids=lambda part: part.name)
def test_an_article_ends_with_a_link_to_the_next_part(part, following):
    end = _prose(ROOT, f"articles/{part.name}.md").rpartition("\n---\n")[2]
    assert f"]({following.name}.md)" in end, "below its last line an article leads on"


@pytest.mark.parametrize("part", ROAD, ids=lambda part: part.name)
def test_an_articles_table_of_exercises_has_the_stars_of_the_manifest(part):
    text = _prose(ROOT, f"articles/{part.name}.md")
    for exercise in part.exercises:
        assert f"| `{exercise.name}`{exercise.stars}" in text, f"{exercise.name}{exercise.stars}"
