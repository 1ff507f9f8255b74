"""/generate, in front of a backend that says what it is told."""

import json

from engine.server.generate import generate_route
from tests.part04.serving import ScriptedBackend, client_of

ASK = {"prompt": "go"}


def test_an_event_is_a_text_and_the_last_one_says_why_it_ended():
    """A token whose text is held back (half a character) brings none."""
    with client_of(ScriptedBackend(["one", "", " two", "", "!"]), extensions=[generate_route]) as client:
        events = client.post("/generate", json=ASK).text.split("\n\n")
    told = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert "".join(event["text"] for event in told) == "one two!"
    assert all(event["text"] for event in told), "an event without text tells nobody anything"
    assert told[-1] == {
        "text": told[-1]["text"], "finish_reason": "length", "prompt_tokens": 2, "completion_tokens": 5,
    }  # fmt: skip
    assert events[-2:] == ["data: [DONE]", ""]


def test_a_last_event_may_have_no_text():
    with client_of(ScriptedBackend([""]), extensions=[generate_route]) as client:
        answer = client.post("/generate", json=ASK).text
    assert '"finish_reason":"length"' in answer, "why it ended is told in any case"


def test_whoever_leaves_a_stream_ends_its_request():
    """`client_of` counts what is open in the end."""
    with (
        client_of(ScriptedBackend(endless=True), extensions=[generate_route]) as client,
        client.stream("POST", "/generate", json=ASK) as answer,
    ):
        assert next(answer.iter_bytes()).startswith(b'data: {"text":')
