"""Rotary positions: Hugging Face's frequencies, bit by bit, for each way of stretching them."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from engine.models.checkpoint import CheckpointError
from engine.models.rope import rope_from, rotate

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SETTINGS = {
    "none": {},
    "theta": {"rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": LLAMA3,
    "llama3 with a theta": LLAMA3 | {"rope_theta": 500000.0, "factor": 32.0},
    "llama3, other borders": LLAMA3 | {"low_freq_factor": 2.0, "high_freq_factor": 3.0},
    "llama3 of a model that says nowhere what it was trained on": {
        key: value for key, value in LLAMA3.items() if not key.startswith("original")
    },
    "yarn": YARN,
    "yarn, not rounded": YARN | {"truncate": False, "original_max_position_embeddings": 4096},
    "yarn, long": YARN | {"rope_theta": 1000000.0, "original_max_position_embeddings": 4096},
    "yarn, other borders": YARN | {"beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, borders that meet": YARN | {"beta_fast": 3.0, "beta_slow": 3.0, "truncate": False},
    "yarn with its own scale": YARN | {"attention_factor": 0.7},
    "yarn with mscale": YARN | {"mscale": 0.8, "mscale_all_dim": 0.5},
    "yarn that stretches nothing": YARN | {"factor": 1.0},
    "yarn that shrinks": YARN | {"factor": 0.5},
    "yarn, all pairs come round": YARN | {"rope_theta": 10.0, "original_max_position_embeddings": 4096},
}  # fmt: skip


def theirs(settings: dict, head_dim: int) -> tuple[torch.Tensor, float]:
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=512,
        rope_parameters=dict(settings),
    )
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        return LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    return ROPE_INIT_FUNCTIONS[kind](config)


@pytest.mark.parametrize("head_dim", [64, 12])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_frequencies_are_hugging_faces(settings, head_dim):
    frequencies, scale = theirs(settings, head_dim)
    ours = rope_from({"max_position_embeddings": 512, "rope_parameters": settings}, head_dim)
    assert torch.equal(torch.tensor(ours.frequencies), frequencies), "ours, and Hugging Face's, in fp32"
    assert ours.scale == pytest.approx(scale, rel=1e-12)


def test_yarn_without_a_factor_takes_the_ratio_of_what_it_sees_to_what_it_was_trained_on():
    told = {"max_position_embeddings": 512, "rope_parameters": YARN | {"factor": 8.0}}
    ratio = {"max_position_embeddings": 512, "rope_parameters": YARN | {"factor": None}}
    assert rope_from(ratio, 64) == rope_from(told, 64)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_older_files_say_the_same_in_other_words(settings):
    """rope_theta and rope_scaling, with "type" for "rope_type"."""
    new = rope_from({"max_position_embeddings": 512, "rope_parameters": settings}, 64)
    scaling = {"type" if key == "rope_type" else key: value for key, value in settings.items()}
    theta = scaling.pop("rope_theta", None)
    raw = {"max_position_embeddings": 512, "rope_scaling": scaling or None} | (
        {"rope_theta": theta} if theta else {}
    )
    assert rope_from(raw, 64) == new


def test_what_it_was_trained_on_may_be_said_beside_it():
    inside = {"max_position_embeddings": 512, "rope_parameters": YARN}
    beside = {key: value for key, value in YARN.items() if not key.startswith("original")}
    outside = {
        "max_position_embeddings": 512,
        "original_max_position_embeddings": 64,
        "rope_parameters": beside,
    }
    assert rope_from(outside, 64) == rope_from(inside, 64)
    beside["original_max_position_embeddings"] = 128
    assert rope_from(outside, 64) == rope_from(inside, 64), "what stands beside goes first"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_heads_are_turned_as_hugging_face_turns_them(dtype):
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=512,
        rope_parameters=YARN | {"rope_theta": 1e4},
    )
    positions = torch.tensor([0, 1, 7, 300, 511])
    q, k = torch.randn(5, 4, 16).to(dtype), torch.randn(5, 2, 16).to(dtype)  # [T, H, Dh]
    cos, sin = LlamaRotaryEmbedding(config)(q, positions[None])
    want = apply_rotary_pos_emb(q[None], k[None], cos, sin, unsqueeze_dim=2)
    rope = rope_from({"max_position_embeddings": 512, "rope_parameters": YARN}, 16)
    angles = rope.angles(positions, torch.tensor(rope.frequencies), dtype)
    assert torch.equal(rotate(q, angles), want[0][0])
    assert torch.equal(rotate(k, angles), want[1][0])


def test_a_product_of_query_and_key_depends_on_their_distance_alone():
    rope = rope_from({"max_position_embeddings": 512}, 16)
    numbers = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 16, dtype=torch.float64, generator=numbers)  # [1, 1, Dh] each
    frequencies = torch.tensor(rope.frequencies, dtype=torch.float64)

    def product(query_at: int, key_at: int) -> float:
        turned = [
            rotate(x, rope.angles(torch.tensor([at]), frequencies, torch.float64))
            for x, at in ((q, query_at), (k, key_at))
        ]
        return float((turned[0] * turned[1]).sum())

    assert product(7, 3) == pytest.approx(product(104, 100), abs=1e-5)
    assert product(7, 3) != pytest.approx(product(7, 4), abs=1e-2)
    assert product(9, 9) == pytest.approx(float((q * k).sum()), abs=1e-6)


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported, only default"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type='longrope'"),
        ({"rope_parameters": {"rope_type": "proportional"}}, "rope_type='proportional'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "has no 'factor'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "2"}}, "factor='2': a number above 0"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor=0"),
        ({"rope_parameters": {"rope_type": "linear", "factor": math.inf}}, "factor=inf"),
        ({"rope_parameters": {"rope_theta": True}}, "rope_theta=True"),
        ({"rope_parameters": LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor=4.0 must be below"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "only one set for all layers"),
        ({"rope_parameters": [1]}, "rope_parameters=.1. is not supported"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused_by_name(raw, named):
    with pytest.raises(CheckpointError, match=named):
        rope_from({"max_position_embeddings": 512} | raw, 64)


def test_an_odd_head_has_no_pairs():
    with pytest.raises(CheckpointError, match="head_dim=13 is odd"):
        rope_from({"max_position_embeddings": 512}, 13)
