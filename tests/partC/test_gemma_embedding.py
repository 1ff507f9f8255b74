"""Gemma's embeddings: scaled, in the right precision, and without a change of the weight."""

import torch

from engine.models.gemma import Model
from engine.models.llama import LlamaConfig
from engine.models.rope import Rope
from engine.quantization.quantize import quantize

D = 48  # √48 is 6.928, and 6.9375 in bfloat16
CONFIG = LlamaConfig(
    model_type="gemma", vocab_size=5, hidden_size=D, num_layers=0, num_heads=1, num_kv_heads=1, head_dim=2,
    intermediate_size=2, max_positions=8, norm_eps=1e-6, activation="gelu_pytorch_tanh",
    tie_word_embeddings=True, rope=Rope((1.0,)),
)  # fmt: skip


def model(dtype: torch.dtype = torch.float32) -> Model:
    made = Model(CONFIG, dtype=dtype).requires_grad_(False)
    made.embed.weight.copy_((torch.arange(5 * D).view(5, D) / 100).to(dtype))
    return made


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
    assert torch.equal(made.head.weight, before), "the output layer has the same weight, and is not scaled"


@torch.inference_mode()
def test_the_root_is_rounded_to_the_rows_dtype_first():
    made = model(torch.bfloat16)
    got = made.embedded(torch.tensor([4]))
    want = (made.embed.weight[[4]].float() * 6.9375).bfloat16()
    assert got.dtype == torch.bfloat16, "the vectors have the weight's dtype"
    assert torch.equal(got, want), "√48 is 6.9375 in bfloat16: the model was trained with the rounded number"


@torch.inference_mode()
def test_quantized_embeddings_are_scaled_too():
    made = model()
    want = made.embed.weight[[1, 4]] * D**0.5
    got = quantize(made, "int8").embedded(torch.tensor([1, 4]))
    torch.testing.assert_close(got, want, rtol=0, atol=0.01 * float(want.max()))
