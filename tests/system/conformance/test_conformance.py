"""`ruvon serve` beside a real vLLM: 244 requests, the answers that vLLM 0.32 gave, and what may differ."""

import json
from collections import Counter

import pytest

from engine.wiring.extensions import is_here
from tests.system.attack import Process
from tests.system.conformance.accepted import GROUPS, PAGE, page, read, unexpected
from tests.system.conformance.cases import CASES
from tests.system.conformance.differences import Difference, ask, differences

ARGUMENTS = ("--model", "storyteller", "--dtype", "float32", "--max-model-len", "512")
MOST_PLACES = 60
OF_EXTENSION_B = () if is_here("B") else ("response_format json", "structured_outputs")


def is_asked(case: str) -> bool:
    """Whether this tree has what the case asks for."""
    return not any(name in case for name in OF_EXTENSION_B)


@pytest.fixture(scope="module")
def recorded() -> dict:
    return json.loads(PAGE.parents[1].joinpath("tests/system/conformance/recorded.json").read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory, recorded) -> dict[str, list[Difference]]:
    """All that differs, by case."""
    server = Process(tmp_path_factory.mktemp("server"), "", *ARGUMENTS)
    try:
        with server.client() as client:
            return {
                case.name: list(differences(case, recorded[case.name], ask(client, case)))
                for case in CASES
                if is_asked(case.name)
            }
    finally:
        server.end()


def test_only_what_is_accepted_differs_from_vllm(found):
    accepted = read()
    rest = [one for differing in found.values() for one in unexpected(differing, accepted)]
    assert not rest, "\n".join(
        f"{one.case}: {one.what} {one.where}\n    vLLM: {one.vllm}\n    ours: {one.ours}" for one in rest
    )


def test_what_is_accepted_still_differs(found):
    used = Counter()
    for deviation in read():
        used.update({place: 0 for place in deviation.places if is_asked(place[0])})
        used.update(deviation.place_of(one) for differing in found.values() for one in differing)
    assert not [place for place, times in used.items() if not times], "no longer a deviation: take it out"


def test_few_deviations_are_accepted_and_each_has_its_reason():
    accepted = read()
    assert sum(len(deviation.places) for deviation in accepted) <= MOST_PLACES
    for deviation in accepted:
        assert deviation.group in GROUPS
        assert all((deviation.topic, deviation.vllm, deviation.ours)), deviation
        assert len(deviation.reason) > 20, deviation


def test_the_page_is_made_from_what_is_accepted():
    assert PAGE.read_text() == page(read(), len(CASES)), "run python -m tests.system.conformance page"


def test_each_case_has_a_name_of_its_own_and_a_recorded_answer(recorded):
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert set(names) == set(recorded)


@pytest.mark.parametrize(
    ("change", "what", "where"),
    [
        (
            lambda body: body["choices"][0].update(finish_reason="stop"),
            "value",
            "body.choices[0].finish_reason",
        ),
        (lambda body: body["choices"][0].update(text="x"), "value", "body.choices[0].text"),
        (lambda body: body["usage"].update(total_tokens=0), "value", "body.usage.total_tokens"),
        (lambda body: body.pop("model"), "missing", "body.model"),
        (lambda body: body.update(more=1), "more", "body.more"),
        (lambda body: body.update(choices=None), "null", "body.choices"),
        (lambda body: body.update(choices="x"), "kind", "body.choices"),
    ],
)
def test_a_change_in_an_answer_is_found(recorded, change, what, where):
    """The comparison itself: what a server that is wrong would say."""
    case = next(case for case in CASES if case.name == "completions: plain")
    answer = recorded[case.name]
    assert not list(differences(case, answer, answer))
    changed = json.loads(json.dumps(answer))
    change(changed["json"])
    assert [(one.what, one.where) for one in differences(case, answer, changed)] == [(what, where)]


def test_a_change_in_a_stream_is_found(recorded):
    case = next(case for case in CASES if case.name == "completions: stream")
    answer = recorded[case.name]
    assert not list(differences(case, answer, answer))
    without_end = answer | {"events": [one for one in answer["events"] if one != "[DONE]"]}
    assert {one.where for one in differences(case, answer, without_end)} == {"stream.order.end"}
    late = json.loads(json.dumps(answer))
    late["events"][0]["choices"][0]["text"] += "!"
    assert "stream.choices.0.text" in {one.where for one in differences(case, answer, late)}
