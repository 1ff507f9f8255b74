"""Gemma's embeddings: scaled, in the right precision, and without a change of the weight."""

from types import SimpleNamespace

import pytest
import torch

from engine.models.gemma import Model
from engine.models.weights import Embedding

D = 48  # √48 is 6.928, and 6.9375 in bfloat16


class Embeddings(Model):
    """A model that has its embedding alone: `Model.__init__` is another exercise, and is not called."""

    def __init__(self, embed) -> None:
        torch.nn.Module.__init__(self)
        self.embed, self.config = embed, SimpleNamespace(hidden_size=D)


def model(dtype: torch.dtype = torch.float32) -> Embeddings:
    embed = Embedding(5, D, dtype=dtype).requires_grad_(False)
    embed.weight.copy_((torch.arange(5 * D).view(5, D) / 100).to(dtype))
    return Embeddings(embed)


@torch.inference_mode()
def test_a_row_is_multiplied_by_the_root_of_its_length():
    made = model()
    want = made.embed.weight[[3, 0, 3]] * D**0.5
    got = made.embedded(torch.tensor([3, 0, 3]))
    torch.testing.assert_close(got, want, msg=lambda text: f"times √D: {text}")


@torch.inference_mode()
def test_the_weight_stays_as_it_is():
    made = model()
    before = made.embed.weight.clone()
    for _ in range(2):
        made.embedded(torch.tensor([1, 2]))
    assert torch.equal(made.embed.weight, before), "the output layer has the same weight, and is not scaled"


class Codes:
    """An embedding that has no weight, as a quantized one (Part 17): each row is ones."""

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return torch.ones(len(token_ids), D)

    @property
    def weight(self) -> torch.Tensor:
        pytest.fail("rows are looked up by self.embed(token_ids): a quantized embedding has no weight")


def test_rows_are_looked_up_by_the_embedding():
    got = Embeddings(Codes()).embedded(torch.tensor([1, 2]))
    torch.testing.assert_close(got, torch.full((2, D), D**0.5), msg=lambda text: f"times √D: {text}")


@torch.inference_mode()
def test_the_root_is_rounded_to_the_rows_dtype_first():
    made = model(torch.bfloat16)
    got = made.embedded(torch.tensor([4]))
    want = (made.embed.weight[[4]].float() * 6.9375).bfloat16()
    assert got.dtype == torch.bfloat16, "the vectors have the weight's dtype"
    assert torch.equal(got, want), "√48 is 6.9375 in bfloat16: the model was trained with the rounded number"
