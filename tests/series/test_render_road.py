"""The table of parts, the plans of a course and the hours are what the manifests say."""

from pathlib import Path

import pytest

from parts.manifest import Part, load_parts
from tests.series.tiny import write
from tools.render_road import PAGES, PLANS, chosen, hours, plan, render, table_of_parts

ROOT = Path(__file__).resolve().parents[2]
LANDED = [part for part in load_parts(ROOT) if part.landed]


@pytest.fixture
def tiny(repo: Path) -> list[Part]:
    """The two parts of the tiny repository: 5 and 10 minutes, one exercise and two."""
    return [part for part in load_parts(repo) if part.landed]


def test_a_row_has_topic_capability_minutes_stars_and_needs(repo):
    manifest = repo / "parts/02_two/part.toml"
    write(repo, "parts/02_two/part.toml", manifest.read_text() + "grade = 2\n")
    rows = table_of_parts(load_parts(repo)[:2], "README.md").splitlines()
    two = "[Two](articles/02_two.md), [notebook](notebooks/02_two.ipynb)"
    assert rows[3] == f"| 2 | {two} | Counts to two. | 10 | ★★ | 1 |"
    assert "](02_two.md), [notebook](../notebooks/" in table_of_parts(
        load_parts(repo)[:2], "articles/course.md"
    )


def test_parts_that_a_part_needs_are_shortened_to_runs():
    row = table_of_parts(chosen("9", LANDED), "README.md").splitlines()[-1]
    assert row.endswith("| 1 to 3, 5 to 8 |")


def test_hours_are_the_sum_of_minutes_to_the_nearest_half(tiny):
    assert [hours(chosen(text, LANDED)) for text in ("3", "1-3", "1, 3")] == ["1", "4.5", "3"]
    assert hours(tiny) == "0.5", "a quarter of an hour is rounded up"


@pytest.mark.parametrize("text", ["1-40", "21", "1, Z"])
def test_a_part_that_is_not_here_is_refused(text):
    with pytest.raises(ValueError, match=r"accepted|no part"):
        chosen(text, LANDED)


@pytest.mark.parametrize("mark", ["<!-- road: no such -->\n<!-- /road -->", "<!-- hours: 1 -->2"])
def test_a_mark_that_is_none_is_refused(mark, tiny):
    with pytest.raises(ValueError, match=r"README\.md: (no block|this mark)"):
        render(mark, "README.md", tiny)


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_takes_each_of_the_twenty_once_and_in_order(name):
    planned = [part.number for week in PLANS[name] for part in chosen(week.parts, LANDED)]
    assert [number for number in planned if not number.is_letter] == list(range(1, 21))
    assert len(PLANS[name]) == {"six weeks": 6, "twelve weeks": 12}[name]


@pytest.mark.parametrize("name", PLANS)
def test_a_week_is_between_an_evening_and_a_day(name):
    """Else the plan is to be cut anew, since a part's minutes have changed."""
    for row in plan(PLANS[name], LANDED, "articles/course.md").splitlines()[2:]:
        time = row.split(" | ")[2]
        assert not time or 1.5 <= float(time) <= 6.5, f"a week of 1.5 to 6.5 hours: {row}"


@pytest.mark.parametrize("page", PAGES)
def test_what_is_committed_is_what_the_manifests_say(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert render(text, page, LANDED) == text, "python tools/render_road.py"
