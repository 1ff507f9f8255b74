"""Gemma's embeddings: scaled, in the right precision, and without a change of the weight."""

import torch

from engine.models.gemma import Embedding

D = 48  # √48 is 6.928, and 6.9375 in bfloat16


def embedding(dtype: torch.dtype = torch.float32) -> Embedding:
    made = Embedding(5, D, dtype=dtype)
    made.weight.data = (torch.arange(5 * D).view(5, D) / 100).to(dtype)
    return made


@torch.inference_mode()
def test_a_row_is_multiplied_by_the_root_of_its_length():
    embed = embedding()
    want = embed.weight[[3, 0, 3]] * D**0.5
    got = embed(torch.tensor([3, 0, 3]))
    torch.testing.assert_close(got, want, msg=lambda text: f"times √D: {text}")


@torch.inference_mode()
def test_the_weight_stays_as_it_is():
    embed = embedding()
    before = embed.weight.clone()
    for _ in range(2):
        embed(torch.tensor([1, 2]))
    assert torch.equal(embed.weight, before), "the output layer has the same weight, and is not scaled"


@torch.inference_mode()
def test_the_root_is_rounded_to_the_weights_dtype_first():
    embed = embedding(torch.bfloat16)
    got = embed(torch.tensor([4]))
    want = (embed.weight[[4]].float() * 6.9375).bfloat16()
    assert got.dtype == torch.bfloat16, "the vectors have the weight's dtype"
    assert torch.equal(got, want), "√48 is 6.9375 in bfloat16: the model was trained with the rounded number"
