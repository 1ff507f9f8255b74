"""`places`: every tensor of a Hugging Face file finds its rows: by hand, and by Hugging Face's own names."""

from dataclasses import replace

import pytest

from benchmarks.part20_models import random_model
from engine.models import llama
from engine.models.config import ModelConfig, architecture
from engine.models.llama import LlamaConfig, Model, places
from engine.models.weights import Place

# 2 query heads of 3 numbers, 1 head of keys and values; D is 8, and not Hq · Dh.
CONFIG = LlamaConfig(
    model_type="llama", vocab_size=5, hidden_size=8, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=3,
    intermediate_size=4, max_positions=8, norm_eps=0.0, activation="silu", tie_word_embeddings=False,
    dtype="float32", raw={},
)  # fmt: skip
VARIANTS = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "attention biases": {"attention_bias": True},
    "mlp biases": {"mlp_bias": True},
    "qwen3": {"qk_norm": True},
}


def test_what_is_outside_the_layers():
    table = places(CONFIG)
    assert table.get("embed_tokens.weight") == Place("embed.weight"), (
        "embed_tokens is our embed, and its name comes without `model.`"
    )
    assert table.get("norm.weight") == Place("norm.weight"), "norm, behind the last layer, is our norm"
    assert table.get("lm_head.weight") == Place("head.weight"), "lm_head is our head"


def test_a_tied_head_has_no_tensor_of_its_own():
    tied = places(replace(CONFIG, tie_word_embeddings=True))
    assert "lm_head.weight" not in tied, "a tied head is the embedding: a file need not have lm_head"


def rows(name: str, config: LlamaConfig = CONFIG) -> tuple[str, slice | None]:
    place = places(config).get(name)
    assert place, f"{name} has no place"
    assert not place.transpose, "both sides keep [out, in]: nothing is transposed"
    return place.parameter, place.rows


def test_queries_keys_and_values_are_rows_of_one_layer():
    ours, at = "blocks.1.attention.qkv.weight", "layers.1.self_attn"
    assert rows(f"{at}.q_proj.weight") == (ours, slice(0, 6)), (
        "queries come first: Hq · Dh rows, whatever D is"
    )
    assert rows(f"{at}.k_proj.weight") == (ours, slice(6, 9)), "then keys: Hkv · Dh rows"
    assert rows(f"{at}.v_proj.weight") == (ours, slice(9, 12)), "then values: Hkv · Dh rows"


def test_gate_and_up_are_rows_of_one_layer():
    ours, at = "blocks.0.mlp.gate_up.weight", "layers.0.mlp"
    assert rows(f"{at}.gate_proj.weight") == (ours, slice(0, 4)), "the gate's rows come first"
    assert rows(f"{at}.up_proj.weight") == (ours, slice(4, 8)), "up's rows come behind the gate's"


def test_the_other_two_linears_are_whole():
    assert rows("layers.1.self_attn.o_proj.weight") == ("blocks.1.attention.proj.weight", None), (
        "o_proj is proj, whole: no rows"
    )
    assert rows("layers.1.mlp.down_proj.weight") == ("blocks.1.mlp.down.weight", None), (
        "down_proj is down, whole: no rows"
    )


def test_which_norm_is_which():
    first, second = "layers.0.input_layernorm.weight", "layers.0.post_attention_layernorm.weight"
    assert rows(first) == ("blocks.0.norm1.weight", None), "input_layernorm stands before attention: norm1"
    assert rows(second) == ("blocks.0.norm2.weight", None), (
        "post_attention_layernorm stands before the mlp: norm2"
    )


def test_a_bias_has_the_rows_of_its_weight():
    biased = replace(CONFIG, attention_bias=True)
    want = "blocks.0.attention.qkv.bias", slice(6, 9)
    assert rows("layers.0.self_attn.k_proj.bias", biased) == want, "a bias has the rows of its weight"


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_row_of_every_parameter_is_filled_once(variant):
    config = replace(CONFIG, **VARIANTS[variant])
    parameters = dict(Model(config).named_parameters())
    filled = {name: [0] * len(parameter) for name, parameter in parameters.items()}
    for theirs, place in places(config).items():
        assert place.parameter in filled, f"{theirs} leads to {place.parameter}, which this model lacks"
        for row in range(len(filled[place.parameter]))[place.rows or slice(None)]:
            filled[place.parameter][row] += 1
    wrong = [name for name, times in filled.items() if set(times) != {1}]
    assert not wrong, f"every row is filled by one tensor, once; not so in {', '.join(wrong[:3])}"


HUGGING_FACES = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("qwen3", {}),
]


@pytest.mark.parametrize(("family", "settings"), HUGGING_FACES)
def test_the_names_are_those_of_hugging_faces_files(family, settings, tmp_path):
    theirs = random_model(family, **settings)
    theirs.config.save_pretrained(tmp_path)
    config = ModelConfig.from_pretrained(tmp_path)
    named = {name.removeprefix(llama.PREFIX) for name, _ in theirs.named_parameters()}
    found = set(architecture(config.model_type).places(config))
    assert not named - found, f"no place for {sorted(named - found)[:3]}"
    assert not found - named, f"a place for {sorted(found - named)[:3]}, which no such file has"
