"""Llama and Qwen3 against Hugging Face's: the same weights, the same ids, the same logits and tokens."""

import json

import pytest
import torch
from transformers import AutoConfig

from benchmarks.part20_models import random_model
from engine import LLM, SamplingParams
from engine.attention.dense import causal, dense_attention
from engine.attention.interface import Spans
from engine.models.checkpoint import CheckpointError
from engine.models.config import ModelConfig
from engine.models.loader import load_model
from tests.part01 import reference
from tests.part20.test_rope import LLAMA3, YARN

SHORT = {"original_max_position_embeddings": 16}
MODELS = {
    "llama": ("llama", {}),
    "a key head for each query head": ("llama", {"num_key_value_heads": None}),
    "one key head": ("llama", {"num_key_value_heads": 1}),
    "wide heads": ("llama", {"head_dim": 32}),
    "attention biases": ("llama", {"attention_bias": True}),
    "mlp biases": ("llama", {"mlp_bias": True}),
    "tied head": ("llama", {"tie_word_embeddings": True}),
    "large epsilon": ("llama", {"rms_norm_eps": 0.1}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "llama3": ("llama", {"rope_parameters": LLAMA3 | SHORT | {"rope_theta": 500.0}}),
    "yarn": ("llama", {"rope_parameters": YARN | SHORT}),
    "qwen3": ("qwen3", {}),
    "qwen3 with biases": ("qwen3", {"attention_bias": True, "rope_parameters": {"rope_theta": 1e6}}),
    "qwen3, tied": ("qwen3", {"tie_word_embeddings": True, "head_dim": 32, "num_attention_heads": 6}),
    "qwen3, yarn": ("qwen3", {"rope_parameters": YARN | SHORT}),
}  # fmt: skip
every_model = pytest.mark.parametrize("name", MODELS)
both = pytest.mark.parametrize("family", ["llama", "qwen3"])


def made(name: str, folder):
    family, settings = MODELS[name]
    theirs = random_model(family, seed=1, **settings)
    return reference.save(theirs, folder, tokenizer=True), theirs


@torch.inference_mode()
def logits(model, token_ids, first: int = 0):
    """token_ids[T] -> [T, V]"""
    positions = torch.arange(first, first + len(token_ids))
    return model.logits(model(torch.tensor(token_ids), positions, causal)).float()


def random_ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(300, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def theirs_both_ways(theirs, ids) -> tuple[torch.Tensor, float]:
    """Hugging Face's logits, and by how much its two ways to attend differ."""
    found = []
    for way in ("eager", "sdpa"):
        theirs.set_attn_implementation(way)
        found.append(reference.logits(theirs, ids))
    return found[1], float((found[0] - found[1]).abs().max())


def outputs_of(layers, compute) -> list[torch.Tensor]:
    """What each of the layers gives, [T, D], while `compute` runs a model that has them."""
    outputs: list[torch.Tensor] = []
    hooks = [layer.register_forward_hook(lambda _, given, output: outputs.append(output)) for layer in layers]
    try:
        compute()
    finally:
        for hook in hooks:
            hook.remove()
    return [output.flatten(0, -2) for output in outputs]


def difference(ours, theirs, ids, got, want, spread: float, allowed: float) -> str:
    """What a learner reads of logits that are too far apart: by how much, from which row and layer on."""
    rows = (got - want).abs().amax(1)  # [T]
    layers = zip(
        outputs_of(ours.blocks, lambda: logits(ours, ids)),
        outputs_of(theirs.model.layers, lambda: reference.logits(theirs, ids)),
        strict=True,
    )
    wrong = [layer for layer, (a, b) in enumerate(layers) if not torch.allclose(a, b, rtol=1e-4, atol=1e-4)]
    row, layer = int((~(rows <= allowed)).nonzero()[0]), wrong[0] if wrong else "the head, behind all layers"
    return (
        f"logits differ from Hugging Face's by {rows.max():.2g}; allowed are {allowed:.2g} (its own two ways "
        f"differ by {spread:.2g}). The first wrong row is {row}, the first wrong layer {layer}"
    )


@every_model
def test_logits_equal_hugging_faces(name, tmp_path):
    folder, theirs = made(name, tmp_path)
    ours = load_model(folder)
    for length in (1, 2, 17, 64):
        ids = random_ids(length, seed=length)
        want, spread = theirs_both_ways(theirs, ids)
        got = logits(ours, ids)
        allowed = 2.3e-5 if spread < 2.3e-5 else 2 * spread
        largest = float((got - want).abs().max())
        assert largest <= allowed, difference(ours, theirs, ids, got, want, spread, allowed)
        assert torch.equal(got.topk(5).indices, want.topk(5).indices), "the five likeliest, in order"


@pytest.mark.parametrize("name", ["llama", "one key head", "wide heads", "llama3", "qwen3", "qwen3, tied"])
def test_greedy_tokens_are_those_of_generate(name, tmp_path):
    folder, theirs = made(name, tmp_path)
    llm = LLM(folder, device="cpu", max_num_seqs=3, kv_cache_memory_bytes=2**22)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompts = [random_ids(length, seed=length) for length in (1, 5, 30)]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    for ids, output in zip(prompts, outputs, strict=True):
        told = reference.generate(theirs, ids, max_new_tokens=20, eos_token_id=None)
        assert output.outputs[0].token_ids == told


@both
@pytest.mark.parametrize(("dtype", "wanted"), [("float16", 0.97), ("bfloat16", 0.9)])
def test_half_precision_agrees_on_the_likeliest_tokens(family, dtype, wanted, tmp_path):
    """With Hugging Face's fp32; its own half precision does about as well."""
    theirs = random_model(family, seed=2, initializer_range=0.1)
    ours = load_model(reference.save(theirs, tmp_path), dtype=dtype)
    ids = random_ids(64)
    a, b = logits(ours, ids).topk(5).indices, reference.logits(theirs, ids).topk(5).indices
    assert (a[:, :, None] == b[:, None, :]).any(dim=2).float().mean() >= wanted
    assert (a[:, 0] == b[:, 0]).float().mean() >= wanted


@both
def test_sequences_laid_end_to_end_do_not_notice_each_other(family, tmp_path):
    model = load_model(reference.save(random_model(family), tmp_path))
    sequences = [random_ids(length, seed=length) for length in (5, 1, 12)]
    starts = (0, 5, 6, 18)
    spans = Spans(starts, starts)
    with torch.inference_mode():
        hidden = model(
            torch.tensor([id for ids in sequences for id in ids]),
            torch.cat([torch.arange(len(ids)) for ids in sequences]),
            lambda layer, q, k, v: dense_attention(q, k, v, spans),
        )
        together = model.logits(hidden)
    for ids, a, b in zip(sequences, starts, starts[1:], strict=False):
        torch.testing.assert_close(together[a:b], logits(model, ids), atol=2e-5, rtol=0)


@both
def test_a_text_reads_the_same_wherever_it_begins(family, tmp_path):
    """Positions are told by distances alone, so no table of them ends: a model that sees 64 computes more."""
    model = load_model(reference.save(random_model(family), tmp_path))
    ids = random_ids(12)
    torch.testing.assert_close(logits(model, ids, first=1000), logits(model, ids), atol=2e-3, rtol=0)


@both
def test_attend_gets_fewer_key_heads_than_query_heads(family, tmp_path):
    model = load_model(reference.save(random_model(family, head_dim=20), tmp_path))
    seen = []

    def attend(layer, q, k, v):
        seen.append((layer, q.shape, k.shape, v.shape))
        return causal(layer, q, k, v)

    model(torch.tensor([5, 6, 7]), torch.arange(3), attend)
    assert seen == [(layer, (3, 4, 20), (3, 2, 20), (3, 2, 20)) for layer in (0, 1)]
    assert model.config.kv_bytes_per_token(2) == 2 * 2 * 2 * 20 * 2, "the cache holds key heads only"


def test_a_token_id_past_the_vocabulary_is_named(tmp_path):
    model = load_model(reference.save(random_model("llama"), tmp_path))
    with pytest.raises(ValueError, match=r"(?=.*\b999\b)(?=.*\b299\b)"):
        logits(model, [5, 999])


@both
def test_frequencies_stay_in_fp32_and_are_no_weights(family, tmp_path):
    model = load_model(reference.save(random_model(family), tmp_path), dtype="bfloat16")
    assert model.frequencies.dtype == torch.float32, "in bf16 position 300 would turn like its neighbours"
    assert "frequencies" not in model.state_dict()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_weights_of_other_versions_load(tmp_path):
    """With a head beside the embedding it is tied to, and with the frequencies, as older files have them."""
    from safetensors.torch import load_file, save_file

    theirs = random_model("llama", tie_word_embeddings=True)
    want = logits(load_model(reference.save(theirs, tmp_path)), [1, 2, 3])
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)
    save_file(tensors, file)
    assert torch.equal(logits(load_model(tmp_path), [1, 2, 3]), want)
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"missing tensor 'layers\.1\.self_attn\.k_proj\.weight'"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("family", "change", "named"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported, only silu"),
        ("llama", {"num_key_value_heads": 3}, "=4 is not a multiple of num_key_value_heads=3"),
        ("llama", {"head_dim": None, "hidden_size": 50}, "hidden_size=50 is not a multiple of"),
        ("llama", {"head_dim": 7}, "head_dim=7 is odd"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        ("llama", {"num_hidden_layers": ...}, "has no 'num_hidden_layers'"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "has sliding_attention"),
        (
            "qwen3",
            {"layer_types": None, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            r"use_sliding_window with sliding_window=8",
        ),
    ],
)  # fmt: skip
def test_a_setting_that_is_not_computed_is_refused_by_name(family, change, named, tmp_path):
    path = reference.save(random_model(family), tmp_path) / "config.json"
    raw = json.loads(path.read_text()) | change
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{named}"):
        ModelConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 8},
    ],
)
def test_a_sliding_window_that_no_layer_has_is_fine(change, tmp_path):
    path = reference.save(random_model("qwen3"), tmp_path) / "config.json"
    raw = json.loads(path.read_text()) | {"layer_types": None}
    del raw["max_window_layers"]  # 28 where a file does not say
    path.write_text(json.dumps(raw | change))
    assert ModelConfig.from_pretrained(tmp_path).model_type == "qwen3"


def test_what_a_file_leaves_out_is_as_hugging_face_has_it(tmp_path):
    raw = json.loads((reference.save(random_model("qwen3"), tmp_path) / "config.json").read_text())
    for name in (
        "head_dim",
        "rms_norm_eps",
        "tie_word_embeddings",
        "attention_bias",
        "rope_parameters",
        "dtype",
    ):
        raw.pop(name, None)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = ModelConfig.from_pretrained(tmp_path)
    assert (config.head_dim, config.norm_eps, config.tie_word_embeddings) == (128, 1e-6, False)
    assert config.rope.frequencies[1] == pytest.approx(10_000 ** (-2 / 128))
    old = raw | {"model_type": "llama", "num_key_value_heads": None, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(old))
    config = ModelConfig.from_pretrained(tmp_path)
    assert (config.num_kv_heads, config.dtype) == (config.num_heads, "bfloat16"), "as older files have it"


@pytest.mark.parametrize(
    "change",
    [
        {"use_sliding_window": True, "max_window_layers": 1},
        {"use_sliding_window": True, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 1},
        {"use_sliding_window": True},
        {"max_window_layers": 1},
        {"num_attention_heads": 64},
    ],
)
def test_qwen3_without_a_setting_is_as_in_hugging_faces_config(change, tmp_path):
    path = reference.save(random_model("qwen3"), tmp_path) / "config.json"
    raw = json.loads(path.read_text())
    defaults = "head_dim", "num_key_value_heads", "layer_types", "sliding_window", "max_window_layers"
    raw = {name: value for name, value in raw.items() if name not in defaults}
    path.write_text(json.dumps(raw | {"num_attention_heads": 32} | change))
    theirs = AutoConfig.from_pretrained(tmp_path)
    if "sliding_attention" in theirs.layer_types:
        with pytest.raises(CheckpointError, match="sliding_attention, which is not supported"):
            ModelConfig.from_pretrained(tmp_path)
    else:
        ours = ModelConfig.from_pretrained(tmp_path)
        assert (ours.num_kv_heads, ours.head_dim) == (theirs.num_key_value_heads, theirs.head_dim)


@pytest.mark.parametrize("outside", ["below", "past"])
def test_an_id_outside_the_vocabulary_is_named(outside, tmp_path):
    model = load_model(reference.save(random_model("llama"), tmp_path))
    last = model.config.vocab_size - 1
    token_id = -1 if outside == "below" else last + 1
    with pytest.raises(ValueError, match=rf"^token id {token_id} is out of range: .* 0 to {last}$"):
        logits(model, [3, token_id, last])
