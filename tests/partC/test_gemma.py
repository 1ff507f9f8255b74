"""Gemma against Hugging Face's: parts in their places, then logits, then tokens."""

import pytest
import torch

from engine import LLM, SamplingParams
from engine.attention.dense import causal
from engine.models import gemma
from engine.models.llama import LlamaConfig
from engine.models.loader import load_model
from engine.models.rope import Rope
from engine.quantization.quantize import quantize
from tests.part01 import reference
from tests.partC.models import random_ids, saved

MODELS = {
    "gemma": {"head_dim": 12},
    "wide heads": {"head_dim": 32, "num_key_value_heads": 1},
    "a head of its own": {"head_dim": 12, "tie_word_embeddings": False},
}
every_model = pytest.mark.parametrize("name", MODELS)


def made(name: str, folder):
    return saved("gemma", folder, seed=1, **MODELS[name])


@torch.inference_mode()
def logits(model, ids: list[int]) -> torch.Tensor:
    return model.logits(model(torch.tensor(ids), torch.arange(len(ids)), causal))


CONFIG = LlamaConfig(
    model_type="gemma", vocab_size=64, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1,
    head_dim=12, intermediate_size=48, max_positions=64, norm_eps=0.01, activation="gelu_pytorch_tanh",
    tie_word_embeddings=True, dtype=None, raw={}, rope=Rope((1.0,) * 6),
)  # fmt: skip


def test_the_parts_are_in_their_places():
    model = gemma.Model(CONFIG)
    norms = [norm for block in model.blocks for norm in (block.norm1, block.norm2)] + [model.norm]
    assert all(isinstance(norm, gemma.RMSNorm) for norm in norms), (
        "all norms are Gemma's: two of each block, and the last"
    )
    assert len({id(norm.weight) for norm in norms}) == 5, "each norm has a weight of its own"
    eps = model.config.norm_eps
    assert all(norm.eps == eps for norm in norms), "each norm has the config's epsilon"
    assert all(isinstance(block.mlp, gemma.MLP) for block in model.blocks), "each block has Gemma's MLP"
    assert model.head.weight is model.embed.weight, "the output layer has the embedding's weight"


def test_the_parts_have_the_models_dtype_and_device():
    model = gemma.Model(CONFIG, "meta", torch.bfloat16)
    wrong = [
        name for name, p in model.named_parameters() if (p.dtype, p.device.type) != (torch.bfloat16, "meta")
    ]
    assert wrong == [], "each new part gets the device and the dtype that the model was given"


@every_model
def test_logits_equal_hugging_faces(name, tmp_path):
    folder, theirs = made(name, tmp_path)
    ours = load_model(folder)
    for length in (1, 5, 40):
        ids = random_ids(length, seed=length)
        got, want = logits(ours, ids), reference.logits(theirs, ids)
        largest = float((got - want).abs().max())
        assert largest <= 1e-4, (
            f"logits differ from Hugging Face's by {largest:.2g}: "
            f"`python -m tools.compare_models FOLDER` names the first layer that differs"
        )


@every_model
def test_greedy_tokens_are_those_of_generate(name, tmp_path):
    folder, theirs = made(name, tmp_path)
    llm = LLM(folder, device="cpu", max_num_seqs=3, kv_cache_memory_bytes=2**22)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    prompts = [random_ids(length, seed=length) for length in (1, 5, 30)]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    for ids, output in zip(prompts, outputs, strict=True):
        want = reference.generate(theirs, ids, max_new_tokens=16, eos_token_id=None)
        assert output.outputs[0].token_ids == want


def test_llamas_kernels_are_not_taken_for_it(tmp_path):
    """They compute SiLU, and norms without the 1."""
    pytest.importorskip("triton", reason="needs the package triton")
    from engine.kernels.llama_rows import LlamaRows

    assert not LlamaRows.fits(load_model(made("wide heads", tmp_path)[0]))


@torch.inference_mode()
def test_quantized_embeddings_are_scaled_too(tmp_path):
    model = load_model(made("gemma", tmp_path)[0])
    ids = torch.tensor([1, 200])
    want = model.embedded(ids)
    got = quantize(model, "int8").embedded(ids)
    torch.testing.assert_close(got, want, rtol=0, atol=0.01 * float(want.abs().max()))
