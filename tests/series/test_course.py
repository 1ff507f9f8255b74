"""A teacher's page has for each part that has landed two questions and two answers, folded."""

import re
from pathlib import Path

import pytest

from parts.manifest import load_parts

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "articles/course.md").read_text(encoding="utf-8")
QUESTIONS = dict(re.findall(r"^### ([^\n]+)\n(.*?)(?=^### |\Z)", TEXT.partition("## Exam")[2], re.M | re.S))
LANDED = [part for part in load_parts(ROOT) if part.landed]


def test_questions_stand_in_the_order_of_the_series():
    assert list(QUESTIONS) == [part.number.label for part in LANDED], (
        "a heading for each part that has landed"
    )


@pytest.mark.parametrize("part", LANDED, ids=lambda part: part.name)
def test_a_part_has_two_questions_and_an_answer_to_each_which_is_folded(part):
    asked, _, answers = QUESTIONS[part.number.label].partition("<details><summary>Answers</summary>")
    assert re.findall(r"^(\d)\. ", asked, re.M) == ["1", "2"], "two questions"
    assert re.findall(r"^(\d)\. ", answers, re.M) == ["1", "2"], "an answer to each"
    assert answers.rstrip().endswith("</details>"), "the answers are folded"
