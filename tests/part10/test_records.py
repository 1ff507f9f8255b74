"""What a reader of an output holds in hand: a read-only dict per token, and how a token is shown."""

import math

import numpy as np
import pytest

from engine.decoding.logprobs import TokenScores, token_text
from engine.decoding.outputs import Logprob
from engine.server.scored import token_json
from tests.part06.fakes import EOS, TOKENIZER


def scores(ids, logprobs, rank) -> TokenScores:
    return TokenScores(np.array(ids), np.array(logprobs, np.float32), rank, lambda id: f"<{id}>")


def test_the_token_is_always_there_beside_the_likeliest():
    own = scores([7, 3, 5], [-4, -0.5, -1.5], rank=9)
    assert dict(own) == {
        7: Logprob(-4.0, 9, "<7>"),
        3: Logprob(-0.5, 1, "<3>"),
        5: Logprob(-1.5, 2, "<5>"),
    }
    assert list(own) == [7, 3, 5]
    assert (len(own), 3 in own, 4 in own) == (3, True, False)


def test_a_token_among_the_likeliest_stands_there_once():
    own = scores([5, 3, 5], [-1.5, -0.5, -1.5], rank=2)
    assert dict(own) == {5: Logprob(-1.5, 2, "<5>"), 3: Logprob(-0.5, 1, "<3>")}
    assert len(own) == 2


def test_it_reads_like_a_dict_and_equals_one():
    own = scores([7, 3], [-4, -0.5], rank=9)
    plain = {7: Logprob(-4.0, 9, "<7>"), 3: Logprob(-0.5, 1, "<3>")}
    assert own == plain
    assert own == scores([7, 3], [-4, -0.5], rank=9)
    assert own != scores([7, 3], [-4, -0.25], rank=9)
    assert (own.token_id, own.logprob, own.top(5)) == (7, -4.0, [(3, -0.5)])
    assert repr(own) == repr(plain)
    with pytest.raises(KeyError):
        own[4]
    with pytest.raises(TypeError):
        own[7] = plain[3]


def test_equals_among_the_likeliest_share_a_rank():
    own = scores([3, 3, 4, 5], [-1, -1, -1, -2], rank=1)
    assert [own[id].rank for id in (3, 4, 5)] == [1, 1, 3]


@pytest.mark.parametrize(
    "own",
    [
        scores([3, 3, 4, 5], [-1, -1, -1, -2], rank=1),
        scores([7, 3, 4, 5, 6], [-9, -0.5, -0.5, -2, -2], rank=40),
        scores([5, 3, 5], [-1.5, -0.5, -1.5], rank=2),
        scores([5, 3, 4], [-0.5, -0.5, -0.5], rank=1),
        scores([5, 3, 4], [-math.inf, -0.5, -math.inf], rank=2),
        scores([7], [-4], rank=9),
    ],
)
def test_the_first_of_them_in_one_pass_are_what_they_are_one_by_one(own):
    for n in range(6):
        ids = dict.fromkeys([own.token_id, *(id for id, _ in own.top(n))])
        assert own.to_dict(n) == {id: own[id] for id in ids}


@pytest.mark.parametrize(
    ("token_id", "shown"),
    [(ord("a"), "a"), (ord("\n"), "\n"), (0xF0, "bytes:\\xf0"), (EOS, "<end>"), (400, "token_id:400")],
)
def test_every_token_can_be_shown(token_id, shown):
    assert token_text(TOKENIZER, token_id) == shown


def test_no_two_tokens_look_the_same():
    assert len({token_text(TOKENIZER, id) for id in range(300)}) == 300


def test_the_chat_apis_entry_has_bytes_and_the_likeliest():
    own = scores([0xF0, 97, 400], [-3, -0.5, -math.inf], rank=4)
    assert token_json(TOKENIZER, own, 2) == {
        "token": "bytes:\\xf0",
        "logprob": -3.0,
        "bytes": [0xF0],
        "top_logprobs": [
            {"token": "a", "logprob": -0.5, "bytes": [97]},
            {"token": "token_id:400", "logprob": -9999.0, "bytes": None},
        ],
    }
    assert [top["token"] for top in token_json(TOKENIZER, own, 1)["top_logprobs"]] == ["a"]
