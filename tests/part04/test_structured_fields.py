"""`structured_fields` alone: what a body says of an output's form becomes parameters, or a 400."""

import pytest

from engine.decoding.params import ParameterError
from engine.decoding.structured import StructuredOutputsParams
from engine.server.errors import RequestError
from engine.server.protocol import CompletionRequest
from engine.server.structured_fields import structure_of, structure_of_rest, with_sent_name

SCHEMA = {"type": "object"}
NAMED = {"name": "a", "schema": SCHEMA}


def body(**sent) -> CompletionRequest:
    return CompletionRequest.model_validate({"model": "m", "prompt": "Once"} | sent)


def structure(**sent) -> StructuredOutputsParams | None:
    asked = body(**sent)
    return structure_of(asked.response_format, asked.structured_outputs)


@pytest.mark.parametrize(
    ("sent", "want"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutputsParams(json_object=True)),
        (
            {"response_format": {"type": "json_schema", "json_schema": NAMED}},
            StructuredOutputsParams(json=SCHEMA),
        ),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, StructuredOutputsParams(json=SCHEMA)),
        (
            {"response_format": {"type": "text"}, "structured_outputs": {"choice": ["a"]}},
            StructuredOutputsParams(choice=["a"]),
        ),
    ],
)
def test_what_an_output_must_fit_is_read_from_the_body(sent, want):
    assert structure(**sent) == want, f"{sent} asks for {want}"


@pytest.mark.parametrize(
    ("sent", "param", "says"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format", "is required with type"),
        ({"response_format": {"type": "text", "json_schema": NAMED}}, "response_format", "needs type"),
        ({"response_format": {"type": "json_object", "json_schema": NAMED}}, "response_format", "needs type"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "one is accepted",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one of json, regex"),
    ],
)
def test_what_nothing_can_fit_is_a_400_that_names_the_field(sent, param, says):
    with pytest.raises(RequestError, match=says) as caught:
        structure(**sent)
    assert (caught.value.status, caught.value.param) == (400, param), f"{sent} is the client's mistake"


def test_a_begun_message_that_is_too_long_is_a_400_that_names_the_messages():
    asked = StructuredOutputsParams(json=SCHEMA)
    assert structure_of_rest(asked, "{").prefix == "{", "the rest has to fit behind what is there"
    with pytest.raises(RequestError, match=r"^messages: the content that the output continues") as caught:
        structure_of_rest(asked, "{" + " " * 70_000)
    assert (caught.value.status, caught.value.param) == (400, "messages"), "the client sent that message"


@pytest.mark.parametrize(
    ("sent", "field"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs"),
        ({}, "tools"),
    ],
)
def test_an_engines_error_has_the_field_that_was_sent(sent, field):
    error = with_sent_name(ParameterError("structured_outputs", "structured_outputs.json: no"), body(**sent))
    inner = ".json" if field == "structured_outputs" else ""
    assert (error.field, str(error)) == (field, f"{field}{inner}: no"), f"{sent} has no other field for it"


@pytest.mark.parametrize(
    "error", [ParameterError("seed", "seed: no"), RequestError(400, "no", param="seed"), ValueError("no")]
)
def test_an_error_about_another_field_stays_as_it_is(error):
    asked = body(response_format={"type": "json_object"})
    assert with_sent_name(error, asked) is error, "it is not about what the output must fit"


class Chat(CompletionRequest):
    def output_bound(self):
        return "max_completion_tokens", 5


def test_how_long_an_answer_may_be_has_the_field_that_was_sent():
    refused = RequestError(429, "full", param="max_tokens", code="c", headers={"Retry-After": "1"})
    error = with_sent_name(refused, Chat(model="m", prompt="Once"))
    assert error.param == "max_completion_tokens", "this body has another name for max_tokens"
    kept = (error.status, error.message, error.code, error.headers)
    assert kept == (429, "full", "c", {"Retry-After": "1"}), "the name alone is changed"


def test_of_two_fields_the_wrong_one_is_named():
    wrong = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": "\ud800"}}}
    with pytest.raises(RequestError, match=r"^response_format has a lone surrogate") as caught:
        structure(response_format=wrong, structured_outputs={"regex": "a"})
    assert caught.value.param == "response_format", "the other field is right"


def test_a_format_that_asks_for_text_is_not_blamed_for_what_a_call_must_fit():
    refused = ParameterError("structured_outputs", "structured_outputs.json: no")
    error = with_sent_name(refused, body(response_format={"type": "text"}))
    assert (error.field, str(error)) == ("tools", "tools: no"), "text asks for nothing: the tools do"
