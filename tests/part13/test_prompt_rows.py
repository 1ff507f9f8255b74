"""Prompts in few kernels: the hidden states of the model itself, and the same keys for attention."""

import pytest
import torch

pytest.importorskip("triton", reason="needs the package triton")

from engine.kernels.prompt_rows import PromptRows, gpt2_prompt_forward
from engine.models.loader import load_model
from tests.part01.reference import random_gpt2, save
from tests.part13.test_paged_attention import DEVICE

VOCAB, TOLERANCE = 70, 2e-5


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    theirs = random_gpt2(vocab_size=VOCAB, n_layer=2, n_embd=48, n_head=3)
    return load_model(save(theirs, tmp_path_factory.mktemp("gpt2")), DEVICE, "float32")


def check(model, fused) -> None:
    """One sequence of seven tokens."""
    seen = []

    def attend(layer, q, k, v):
        seen.append((layer, q.clone(), k.clone(), v.clone()))
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1) for x in (q, k, v)), is_causal=True
        )
        return out.transpose(0, 1)

    tokens = torch.randint(VOCAB, (7,), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    positions = torch.arange(11, 18, device=DEVICE)
    with torch.inference_mode():
        want, asked = model(tokens, positions, attend), seen[:]
        seen.clear()
        got = fused(tokens, positions, attend)
    for mine, theirs in zip(seen, asked, strict=True):
        assert mine[0] == theirs[0], "layers come in order"
        for a, b in zip(mine[1:], theirs[1:], strict=True):
            assert torch.allclose(a, b, atol=TOLERANCE), "attention is given the model's queries and keys"
    assert torch.allclose(got, want, atol=TOLERANCE), "the hidden states are the model's"


def test_hidden_states_are_the_models(model):
    check(model, PromptRows(model))


def test_without_a_gpu_the_model_itself_is_taken(model):
    assert (gpt2_prompt_forward(model) is model) == (DEVICE == "cpu")
