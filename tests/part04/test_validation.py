"""`errors._from_validation` alone: pydantic's complaint becomes a 400 that a client can act on."""

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from engine.server.errors import RequestError, as_request_error
from engine.server.protocol import CompletionRequest

GOOD = {"model": "m", "prompt": "Once"}


def refusal(body: dict) -> RequestError:
    """What a client is told of `body`, which FastAPI has checked before."""
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate(body)
    complaints = [error | {"loc": ("body", *error["loc"])} for error in caught.value.errors()]
    return told(complaints, body)


def told(complaints: list[dict], body=None) -> RequestError:
    return as_request_error(RequestValidationError(complaints, body=body))


def test_a_wrong_body_is_the_clients_mistake():
    assert refusal(GOOD | {"max_tokens": "5"}).status == 400, "OpenAI answers a wrong field with 400"


def test_param_names_the_field():
    error = refusal(GOOD | {"max_tokens": "5"})
    assert error.param == "max_tokens", "param is the field's name, without the `body` it lies in"


def test_the_message_has_field_value_and_complaint():
    error = refusal(GOOD | {"max_tokens": "5"})
    want = "max_tokens='5': Input should be a valid integer"
    assert error.message == want, "the message is field=value: what pydantic says"


def test_a_number_without_a_fraction_is_an_integer():
    """As JSON Schema has it. A text is none, nor is a number with a fraction."""
    body = CompletionRequest.model_validate(
        GOOD | {"max_tokens": 5.0, "n": 2.0, "seed": -1.0, "logprobs": 0.0}
    )
    params = body.sampling_params()
    assert [params.max_tokens, params.n, params.seed, params.logprobs] == [5, 2, -1, 0]
    assert type(params.max_tokens) is int
    for field in ("max_tokens", "n", "seed", "top_k", "min_tokens", "priority", "truncate_prompt_tokens"):
        for value in (5.5, "5", True):
            error = refusal(GOOD | {field: value})
            assert error.param == field, f"{field}={value!r} is no integer"
    with pytest.raises(ValidationError):
        CompletionRequest.model_validate(GOOD | {"max_tokens": float("inf")})


def test_the_first_of_several_complaints_is_told():
    complaints = [
        {"type": "int_type", "loc": ("body", name), "msg": "Input should be a valid integer", "input": "x"}
        for name in ("max_tokens", "seed", "top_k")
    ]
    assert told(complaints).param == "max_tokens", "of several complaints the first is told"


def test_a_missing_field_is_required():
    error = refusal({"model": "m"})
    assert (error.message, error.param) == ("prompt is required", "prompt"), "a missing field is required"


def test_a_field_of_two_kinds_of_number_says_number():
    for value in ("hot", True, None, [1]):
        with pytest.raises(ValidationError, match="Input should be a valid number"):
            CompletionRequest.model_validate(GOOD | {"logit_bias": {"1": value}})


def test_an_unknown_field_is_no_field_of_this_endpoint():
    error = refusal(GOOD | {"tempertaure": 0.2})
    assert error.message == "tempertaure is not a field of this endpoint", "an unknown field is named as such"
    assert (error.param, error.code) == ("tempertaure", "unknown_field"), "its code is unknown_field"


def test_an_unknown_field_called_body_is_named_too():
    error = refusal(GOOD | {"body": 1})
    words = "a field may be called body: only the `body` at the path's beginning is left out"
    assert (error.message, error.param) == ("body is not a field of this endpoint", "body"), words


def test_a_field_within_a_field_is_named_in_full_and_param_is_the_outer_one():
    error = refusal(GOOD | {"stream_options": {"colour": 1}})
    assert error.param == "stream_options", "param is the body's own field, not one within it"
    want = "stream_options.colour is not a field of this endpoint"
    assert error.message == want, "an unknown field is named with its whole path"


def test_a_missing_field_within_a_field_is_named_in_full():
    complaint = {"type": "missing", "loc": ("body", "messages", 0, "content"), "msg": "", "input": {}}
    error = told([complaint])
    want = ("messages.0.content is required", "messages")
    assert (error.message, error.param) == want, "a missing field is named with its whole path"


def test_a_body_that_is_no_json_has_no_field():
    complaint = {"type": "json_invalid", "loc": ("body", 7), "msg": "JSON decode error", "input": {}}
    error = told([complaint | {"ctx": {"error": "Expecting value"}}])
    assert error.message == "the body is not valid JSON: Expecting value", "what the JSON reader says is told"
    assert error.param is None, "a place in the text is no field"


def test_a_body_that_was_not_read_as_json_asks_for_the_header():
    complaint = {
        "type": "model_attributes_type",
        "loc": ("body",),
        "msg": "Input should be a valid dictionary",
    }
    error = told([complaint | {"input": b"{}"}], body=b"{}")
    assert "send Content-Type: application/json" in error.message, "a body of bytes was not read as JSON"


def test_no_body_at_all_is_told():
    error = told([{"type": "missing", "loc": ("body",), "msg": "Field required", "input": None}])
    assert error.message == "a JSON body is required", "no field is missing: the body is"


def test_a_long_value_is_shortened():
    error = refusal(GOOD | {"max_tokens": "9" * 10_000})
    assert len(error.message) < 300, "a long value is shortened: a message does not send the body back"
    assert error.message.endswith("Input should be a valid integer"), "the complaint comes after the value"


def test_a_body_that_is_no_object_is_called_body():
    complaint = {
        "type": "model_attributes_type",
        "loc": ("body",),
        "msg": "Input should be a valid dictionary",
    }
    error = told([complaint | {"input": [1]}], body=[1])
    assert (error.message, error.param) == ("body=[1]: Input should be a valid dictionary", None), (
        "where the path names no field, param is None, and the message says `body` in its place"
    )


def test_an_empty_body_is_no_body():
    """Bytes that are not empty were declared as something else than JSON; empty ones are nothing at all."""
    complaint = {"type": "missing", "loc": ("body",), "msg": "Field required", "input": None}
    assert told([complaint], body=b"").message == "a JSON body is required", "an empty body is no body"
