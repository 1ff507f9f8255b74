"""One choice of a chat, as a message or as what is new of it, without a server. From small to large."""

import math

import numpy as np
import pytest

from engine.decoding.logprobs import TokenScores, token_text
from engine.decoding.outputs import CompletionOutput, RequestOutput
from engine.server.chat import Chat, ChatRequest
from tests.part06.fakes import TOKENIZER

CHAT = Chat(TOKENIZER)
SAID = b"Hi \xc3\xa9!"  # six tokens of the byte tokenizer; the fourth and the fifth are one character
OFFSETS = [0, 1, 2, 3, 4, 4]  # where each token begins in "Hi é!", and the character's second half behind it


def scores(token_id):
    """Probability 1/2 for this token, 1/4 for the next one, 1/8 for the one behind."""
    ids = np.array([token_id, token_id, token_id + 1, token_id + 2])
    logprobs = -np.log([2.0, 2.0, 4.0, 8.0])
    return TokenScores(ids, logprobs, 1, lambda id: token_text(TOKENIZER, id))


def sample(tokens, text, reason=None, scored=True):
    """What has been said after so many tokens."""
    ids = list(SAID[:tokens])
    extra = {"logprobs": [scores(id) for id in ids], "text_offsets": OFFSETS[:tokens]} if scored else {}
    return CompletionOutput(0, text, ids, reason, **extra)


def choice(now, previous=None, **body):
    asked = ChatRequest(model="m", messages=[{"role": "user", "content": "Hi"}], **body)
    output = RequestOutput("r", None, [7], [now], now.finish_reason is not None)
    return CHAT.choice(asked, output, now, previous)


WHOLE = sample(6, "Hi é!", "stop", scored=False)


def test_a_whole_message():
    got = choice(WHOLE)
    assert got == {
        "message": {"role": "assistant", "content": "Hi é!", "refusal": None},
        "logprobs": None,
        "finish_reason": "stop",
    }


def test_a_delta_has_what_is_new_and_no_role():
    got = choice(sample(1, "H", scored=False), stream=True)
    assert "message" not in got, "in a stream, the choice has a `delta` and no `message`"
    assert got["delta"].get("content") == "H", "nothing was shown yet: all of the text is new"
    assert got["delta"] == {"content": "H"}, "a delta has content alone: the opening has said who speaks"
    got = choice(WHOLE, previous=sample(2, "Hi", scored=False), stream=True)
    assert got["delta"]["content"] == " é!", "a delta is what the text has beyond what was shown"
    assert got["finish_reason"] == "stop", "the finish reason is the sample's"


def test_the_deltas_are_the_message():
    steps = [sample(n, text, scored=False) for n, text in ((1, "H"), (3, "Hi "), (5, "Hi é"))] + [WHOLE]
    said = [
        choice(now, before, stream=True)["delta"]["content"]
        for before, now in zip([None, *steps], steps, strict=False)
    ]
    assert said == ["H", "i ", "é", "!"], "the deltas, one behind the other, are the message"


def test_the_last_delta_may_be_empty():
    """A text that was complete before the model said that it is."""
    got = choice(WHOLE, previous=sample(6, "Hi é!", scored=False), stream=True)
    assert got == {"delta": {"content": ""}, "logprobs": None, "finish_reason": "stop"}


def test_logprobs_of_a_message():
    got = choice(sample(2, "Hi", "length"), logprobs=True)["logprobs"]
    assert isinstance(got, dict), "logprobs are an object with the entries as `content`"
    assert set(got) == {"content", "refusal"}, "logprobs are an object with the entries as `content`"
    assert got["refusal"] is None
    assert [entry["token"] for entry in got["content"]] == ["H", "i"], "an entry for each token"
    assert [entry["top_logprobs"] for entry in got["content"]] == [[], []], (
        "without top_logprobs, no likeliest tokens are listed"
    )
    first = choice(sample(1, "H", "length"), logprobs=True, top_logprobs=2)["logprobs"]["content"][0]
    assert [candidate["token"] for candidate in first["top_logprobs"]] == ["H", "I"], (
        "as many of the likeliest as top_logprobs says"
    )
    assert first["logprob"] == pytest.approx(-math.log(2))


def test_logprobs_only_if_asked_for():
    got = choice(sample(2, "Hi", "length"), logprobs=False)
    assert got["logprobs"] is None, "nobody asked for log probabilities: null"
    assert choice(sample(2, "Hi", "length"))["logprobs"] is None


def test_logprobs_of_a_delta_are_those_of_new_tokens():
    one, three = sample(1, "H"), sample(3, "Hi ")
    got = choice(three, previous=one, logprobs=True, stream=True)["logprobs"]["content"]
    assert [entry["token"] for entry in got] == ["i", " "], (
        "tokens that went with an earlier delta are not told again"
    )


def test_a_token_goes_with_the_text_that_it_begins():
    """Half a character is held back, and so is its token: `num_visible_tokens` does not count it yet."""
    three, half, five = sample(3, "Hi "), sample(4, "Hi "), sample(5, "Hi é")
    got = choice(half, previous=sample(2, "Hi"), logprobs=True, stream=True)["logprobs"]["content"]
    assert [entry["token"] for entry in got] == [" "], (
        "a token whose text is held back goes with a later delta: count with `num_visible_tokens`"
    )
    got = choice(five, previous=half, logprobs=True, stream=True)["logprobs"]["content"]
    assert got[0]["bytes"] == [0xC3], "the token that was held back is told with the text that it begins"
    got = choice(half, previous=three, logprobs=True, stream=True)["logprobs"]
    assert got == {"content": [], "refusal": None}, "no new token: an empty list, and no null"
    deltas = [(None, three), (three, half), (half, five), (five, sample(6, "Hi é!", "stop"))]
    told = [
        entry["bytes"]
        for before, now in deltas
        for entry in choice(now, before, logprobs=True, stream=True)["logprobs"]["content"]
    ]
    assert told == [[byte] for byte in SAID], "in the end, every token was told once"


def test_the_opening_says_who_speaks_before_there_is_a_word():
    asked = ChatRequest(model="m", messages=[{"role": "user", "content": "Hi"}], n=2, stream=True)
    opening = CHAT.opening(asked)
    assert [(choice["index"], choice["delta"]) for choice in opening] == [
        (i, {"role": "assistant", "content": ""}) for i in range(2)
    ]


def test_what_goes_on_in_a_users_message_is_shown_as_one():
    """The model goes on in the last message, "Hi" of a user, and the client wants to see it whole."""
    goes_on = {"add_generation_prompt": False, "continue_final_message": True, "echo": True}
    message = choice(WHOLE, **goes_on)["message"]
    assert message["role"] == "user", "the role is body.role(): whose message the model writes"
    assert message["content"] == "HiHi é!", "the content is body.echoed(), and then the text"
    delta = choice(WHOLE, stream=True, **goes_on)["delta"]
    assert delta == {"content": "Hi é!"}, "in a stream, the opening has sent the echo"


def test_tokens_may_be_named_by_their_ids():
    got = choice(sample(1, "H", "length"), logprobs=True, return_tokens_as_token_ids=True)["logprobs"]
    assert got["content"][0]["token"] == f"token_id:{SAID[0]}", (
        "return_tokens_as_token_ids is the last argument of `token_json`"
    )
