"""A check ends at the first thing that is wrong, and what has a bound is accepted up to it."""

import pytest
from pydantic import ValidationError

from engine.server import limits
from engine.server.errors import RequestError
from engine.server.protocol import CompletionRequest, StreamOptions

GOOD = {"model": "m", "prompt": "a"}
MANY = 5000
WRONG = {
    "empty lists": {"prompt": [[]] * MANY},
    "lists of texts": {"prompt": [["a"]] * MANY},
    "one list of texts": {"prompt": [["a"] * MANY]},
    "ids that become texts": {"prompt": [1] + ["a"] * MANY},
    "texts that become ids": {"prompt": ["a"] + [1] * MANY},
    "as many texts as are accepted": {"prompt": ["a"] + [1] * (limits.MAX_PROMPTS - 1)},
    "as many lists as are accepted": {"prompt": [["a"]] * limits.MAX_PROMPTS},
    "as many stops as are accepted": {"stop": ["a"] + [1] * (limits.MAX_STOPS - 1)},
    "as many stop tokens as are accepted": {"stop_token_ids": [""] * limits.MAX_STOP_TOKEN_IDS},
    "objects": {"prompt": [{}] * MANY},
    "stops": {"stop": ["a"] + [1] * MANY},
    "stop tokens": {"stop_token_ids": [""] * MANY},
    "bad words": {"bad_words": [1] * MANY},
    "as many bad words as are accepted": {"bad_words": ["a"] + [1] * (limits.MAX_BAD_WORDS - 1)},
    "allowed tokens": {"allowed_token_ids": [""] * MANY},
    "biases": {"logit_bias": {str(i): "" for i in range(MANY)}},
    "unknown fields": {f"x{i}": 0 for i in range(MANY)},
    "unknown options": {"stream_options": {f"x{i}": 0 for i in range(MANY)}},
}


@pytest.mark.parametrize("name", WRONG)
def test_there_are_no_more_complaints_than_fields(name):
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate(GOOD | WRONG[name])
    few = {
        "unknown fields": len(CompletionRequest.model_fields) + 1,
        "unknown options": len(StreamOptions.model_fields) + 1,
    }
    assert caught.value.error_count() <= few.get(name, 1), "it complains of everything that is wrong"


def at_most(field: str, most: int, item) -> tuple:
    return field, [item] * most, [item] * (most + 1)


BOUNDS = [
    at_most("prompt", limits.MAX_PROMPTS, "a"),
    at_most("prompt", limits.MAX_PROMPTS, [1]),
    at_most("stop", limits.MAX_STOPS, "a"),
    at_most("bad_words", limits.MAX_BAD_WORDS, "a"),
    ("bad_words", ["a" * limits.MAX_BAD_WORD_CHARACTERS], ["a" * (limits.MAX_BAD_WORD_CHARACTERS + 1)]),
    at_most("stop_token_ids", limits.MAX_STOP_TOKEN_IDS, 1),
    ("stop", "a" * limits.MAX_STOP_CHARACTERS, "a" * (limits.MAX_STOP_CHARACTERS + 1)),
    ("stop", ["a" * limits.MAX_STOP_CHARACTERS], ["a" * (limits.MAX_STOP_CHARACTERS + 1)]),
    ("model", "a" * limits.MAX_NAME_CHARACTERS, "a" * (limits.MAX_NAME_CHARACTERS + 1)),
    ("user", "a" * limits.MAX_NAME_CHARACTERS, "a" * (limits.MAX_NAME_CHARACTERS + 1)),
    ("cache_salt", "a" * limits.MAX_NAME_CHARACTERS, "a" * (limits.MAX_NAME_CHARACTERS + 1)),
    ("logit_bias", *({str(i): 1 for i in range(limits.MAX_LOGIT_BIAS + more)} for more in (0, 1))),
]  # fmt: skip


@pytest.mark.parametrize(
    ("field", "most", "more"), BOUNDS, ids=[f"{i}-{row[0]}" for i, row in enumerate(BOUNDS)]
)
def test_what_has_a_bound_is_accepted_up_to_it(field, most, more):
    body = CompletionRequest.model_validate(GOOD | {field: most})
    body.prompts(), body.sampling_params()
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate(GOOD | {field: more})
    assert caught.value.errors()[0]["loc"][0] == field


@pytest.mark.parametrize(("prompts", "n"), [(128, 1), (64, 2), (1, 128), (2, 64)])
def test_as_many_choices_as_are_accepted(prompts, n):
    body = CompletionRequest.model_validate(GOOD | {"prompt": ["a"] * prompts, "n": n})
    assert len(body.prompts()) == prompts


@pytest.mark.parametrize(("prompts", "n"), [(128, 2), (65, 2), (2, 65), (2, 128)])
def test_too_many_choices_though_neither_number_is_too_large(prompts, n):
    body = CompletionRequest.model_validate(GOOD | {"prompt": ["a"] * prompts, "n": n})
    with pytest.raises(RequestError, match="more than 128 choices") as caught:
        body.prompts()
    assert caught.value.param == "n"


def test_an_error_is_short_in_all_its_fields():
    error = RequestError(400, "a" * 10**6, param="b" * 10**6).body()["error"]
    assert max(len(value or "") for value in error.values()) <= limits.MAX_MESSAGE_CHARACTERS
