"""`Model.forward` on a tiny GPT-2 with random weights, one rule at a time. Hugging Face comes after."""

import re

import pytest
import torch
from torch import nn

from engine.attention.dense import causal
from engine.models.config import ModelConfig
from engine.models.gpt2 import Model
from tests.part01.outcome import outcome

CONFIG = ModelConfig(
    model_type="gpt2", vocab_size=20, hidden_size=8, num_layers=3, num_heads=2, num_kv_heads=2, head_dim=4,
    intermediate_size=16, max_positions=10, norm_eps=1e-5, activation="relu", tie_word_embeddings=True,
)  # fmt: skip
IDS = torch.tensor([3, 1, 4, 1])  # the last token is the second one again, at another place
PLACES = torch.arange(4)


class Noted(nn.Module):
    """A block that adds its number to every vector, and notes what it was given."""

    def __init__(self, number: int, seen: list) -> None:
        super().__init__()
        self.number, self.seen = number, seen

    def forward(self, x, attend):
        self.seen.append((self.number, x.clone(), attend))
        return x + self.number


@pytest.fixture
def model() -> Model:
    model = Model(CONFIG)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter.data, generator=generator)
    return model


@pytest.fixture
def seen(model) -> list:
    """(number, x, attend) for each call of a block, of which the model has three."""
    seen = []
    model.blocks = nn.ModuleList(Noted(number, seen) for number in (1, 2, 3))
    return seen


@torch.inference_mode()
def hidden(model, ids=IDS, positions=PLACES, attend=causal):
    return outcome(model, ids, positions, attend)


def test_a_vector_per_token_comes_out(model):
    got = hidden(model)
    assert getattr(got, "shape", got) == (4, 8), (
        "hidden[T, D] comes out: a vector per token, and no logits yet"
    )


def test_a_vector_is_its_token_plus_its_place(model, seen):
    hidden(model)
    want = model.embed.weight[IDS] + model.embed_position.weight[:4]
    assert torch.allclose(seen[0][1], want), "x starts as the token's embedding plus its position's"


def test_the_places_are_the_positions_handed_in(model, seen):
    hidden(model, positions=PLACES + 5)
    want = model.embed.weight[IDS] + model.embed_position.weight[5:9]
    assert torch.allclose(seen[0][1], want), "places come from `positions`: a pass may begin in mid-sequence"


def test_the_blocks_run_one_after_the_other(model, seen):
    hidden(model)
    assert [number for number, _, _ in seen] == [1, 2, 3], "every block runs, once, in order"
    assert torch.allclose(seen[2][1], seen[0][1] + 1 + 2), "each block is given what the one before it made"


def test_every_block_is_given_the_attention_that_was_handed_in(model, seen):
    def mine(layer, q, k, v):
        return q

    hidden(model, attend=mine)
    assert all(attend is mine for _, _, attend in seen), "the blocks use the `attend` that was handed in"


def test_the_last_norm_comes_at_the_end(model, seen):
    got = hidden(model)
    want = model.norm(seen[2][1] + 3)
    assert torch.allclose(got, want, atol=1e-5), "what the last block made goes through `norm`, and comes out"


def test_the_last_place_there_is_may_be_used(model):
    got = hidden(model, positions=torch.tensor([6, 7, 8, 9]))
    assert isinstance(got, torch.Tensor), f"position 9 of 0 to 9 is in the table, but: {got}"


@pytest.mark.parametrize("place", [10, 11, 500])
def test_a_place_past_the_table_is_refused(model, place):
    got = hidden(model, positions=torch.tensor([7, 8, 9, place]))
    assert str(got).startswith("ValueError"), "a position past the table is refused with a ValueError"
    assert str(place) in got, "the error names the position that is out of range"
    assert re.search(r"\b9\b", got), "the error names the last position there is"


def test_a_place_past_the_table_is_refused_wherever_it_stands(model):
    """Several sequences may lie end to end: the last position need not be the largest."""
    got = hidden(model, positions=torch.tensor([9, 10, 0, 1]))
    assert str(got).startswith("ValueError"), "the largest position counts, wherever it stands in `positions`"
    assert "10" in got, "the error names the largest position, wherever it stands in `positions`"


@pytest.mark.parametrize("id", [20, 300])
def test_a_token_id_past_the_table_is_refused(model, id):
    got = hidden(model, ids=torch.tensor([3, 1, 4, id]))
    assert str(got).startswith("ValueError"), "a token id past the table is refused with a ValueError"
    assert str(id) in got, "the error names the token id that is out of range"
    assert re.search(r"\b19\b", got), "the error names the last token id there is"


def test_a_token_id_past_the_table_is_refused_wherever_it_stands(model):
    got = hidden(model, ids=torch.tensor([3, 20, 4, 1]))
    assert str(got).startswith("ValueError"), "the largest token id counts, wherever it stands in `token_ids`"
    assert re.search(r"\b20\b", got), (
        "the error names the largest token id, wherever it stands in `token_ids`"
    )
