"""`CachedForward`, with a model that only notes how it is called: which tokens, where, and whose logits."""

import re

import pytest
import torch
from torch import nn

from engine.cache.single import CachedForward
from engine.models.config import ModelConfig

CONFIG = ModelConfig(
    model_type="mock", vocab_size=2, hidden_size=1, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=1,
    intermediate_size=1, max_positions=20, norm_eps=1.0, activation="none", tie_word_embeddings=True,
)  # fmt: skip


class Noted(nn.Module):
    """A model without layers: a token's vector is its id, and its logits are [id, -id]."""

    config = CONFIG

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.cache, self.ids, self.positions, self.lengths, self.rows = None, [], [], [], []

    def forward(self, token_ids, positions, attend):
        self.ids.append(token_ids.tolist())
        self.positions.append(positions.tolist())
        self.lengths.append(self.cache.length)
        return token_ids[:, None].float()  # [T, 1]

    def logits(self, hidden):
        self.rows.append(len(hidden))
        return torch.cat([hidden, -hidden], dim=1)  # [R, 2]


def noted(max_tokens=None):
    """(forward, its model)"""
    model = Noted()
    forward = CachedForward(model, max_tokens)
    model.cache = forward.cache
    return forward, model


# The first call: prefill.


def test_the_first_call_runs_the_whole_prompt():
    forward, model = noted()
    forward([10, 11, 12])
    assert model.ids == [[10, 11, 12]], "an empty cache: every token of the prompt is new and is run"


def test_the_prompts_tokens_stand_at_0_and_after():
    forward, model = noted()
    forward([10, 11, 12])
    assert model.positions == [[0, 1, 2]], "a token's position is its place in the sequence, counted from 0"


def test_the_cache_is_advanced_after_the_model_not_before():
    forward, model = noted()
    forward([10, 11, 12])
    assert model.lengths == [0], (
        "while the model runs, the cache still holds 0 tokens: all layers write there"
    )
    assert forward.cache.length == 3, "after the call the cache holds the 3 tokens that were run"


def test_the_logits_are_those_after_the_last_token():
    forward, model = noted()
    logits = forward([10, 11, 12])
    assert logits.tolist() == [12, -12], "logits[V] of the next token come from the last row"
    assert model.rows == [1], "one row's logits are asked for, not all"


# A later call: decode.


def test_a_later_call_runs_only_what_the_cache_does_not_hold():
    forward, model = noted()
    forward([10, 11, 12])
    forward([10, 11, 12, 13])
    assert model.ids[1] == [13], "the cache holds 3 of the 4 tokens: only the fourth is run"
    assert forward.cache.length == 4, "the cache grows by what was run, and then holds 4 tokens"


def test_a_new_token_stands_at_its_true_position_though_it_travels_alone():
    forward, model = noted()
    forward([10, 11, 12])
    forward([10, 11, 12, 13])
    assert model.positions[1] == [3], "the fourth token stands at position 3, though it travels alone"


def test_several_new_tokens_are_run_together():
    forward, model = noted()
    for length in (3, 4, 5, 9):
        forward(list(range(10, 10 + length)))
    assert model.ids[2:] == [[14], [15, 16, 17, 18]], "every token that the cache does not hold is run, once"
    assert model.positions[2:] == [[4], [5, 6, 7, 8]], "positions go on where the cache ends"
    assert model.lengths == [0, 3, 4, 5], "the cache grows by what was run"
    assert forward.cache.length == 9, "the cache grows by what was run"
    assert model.rows == [1] * 4, "one row's logits are asked for, not all"


# What is refused.


@pytest.mark.parametrize(
    ("held", "given"),
    [(0, 0), (3, 3), (3, 2), (0, 11), (10, 11)],
    ids=["no token", "nothing new", "fewer than held", "a prompt too long", "a token too many"],
)
def test_a_sequence_that_does_not_grow_or_does_not_fit_is_refused(held, given):
    forward, _ = noted(max_tokens=10)
    try:
        if held:
            forward([1] * held)
    except ValueError as error:
        pytest.fail(f"{held} tokens fit into room for 10, up to the last place, yet: {error}", False)
    try:
        forward([1] * given)
    except ValueError as error:
        told = str(error)
    except Exception as error:
        pytest.fail(
            f"nothing new, or no more room, is a ValueError, not {type(error).__name__}: {error}", False
        )
    else:
        pytest.fail(
            f"{given} tokens given, {held} held, room for 10: nothing new, or no more room, is refused with "
            "a ValueError",
            False,
        )
    numbers = set(map(int, re.findall(r"\d+", told)))
    assert {given, held, 10} <= numbers, f"the error names the tokens given, held and the room: {told!r}"
    assert forward.cache.length == held, "a refused call changes nothing"


# How it is made.


def test_room_is_the_models_length_unless_said():
    assert noted()[0].cache.max_tokens == 20
    assert noted(max_tokens=7)[0].cache.max_tokens == 7


def test_two_requests_have_a_cache_each():
    (one, first), (two, second) = noted(), noted()
    one([1, 2, 3])
    two([9, 8, 7, 6, 5])
    one([1, 2, 3, 4])
    assert (first.ids, second.ids) == ([[1, 2, 3], [4]], [[9, 8, 7, 6, 5]])
