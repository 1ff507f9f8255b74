"""Gemma's config.json."""

import pytest

from engine.models.checkpoint import CheckpointError
from engine.models.gemma import config_from

RAW = {
    "model_type": "gemma", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 80,
    "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 1,
    "max_position_embeddings": 64, "head_dim": 12, "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip


def without(*names: str) -> dict:
    return {name: value for name, value in RAW.items() if name not in names}


def refusal(raw: dict) -> str:
    """What `config_from` says where it refuses; empty where it does not."""
    try:
        config_from(raw)
    except CheckpointError as error:
        return str(error)
    return ""


def test_what_the_file_says():
    raw = dict(RAW)
    config = config_from(raw)
    assert raw == RAW, "the dict that came in is read, and not written to"
    assert config.head_dim == 12, "head_dim is what the file says: defaults do not win over it"
    assert (config.hidden_size, config.num_heads, config.num_kv_heads) == (64, 16, 1)
    assert config.raw == RAW, "`raw` is the content of config.json, unchanged"


def test_a_head_has_256_numbers_where_the_file_does_not_say():
    config = config_from(without("head_dim"))
    assert config.head_dim == 256, "head_dim is 256 where the file does not say, whatever D / Hq is"
    assert config.tie_word_embeddings, "and the output layer has the embedding's weight"


def test_key_heads_are_16_where_the_file_does_not_say():
    """Gemma 7B's. Llama's translation would take as many as there are query heads."""
    config = config_from(without("num_key_value_heads") | {"num_attention_heads": 32})
    assert config.num_kv_heads == 16, "what the file leaves out stands in DEFAULTS"


@pytest.mark.parametrize("settings", [RAW, without("hidden_act"), RAW | {"hidden_act": "gelu"}])
def test_the_activation_is_gelus_approximation(settings):
    """The first releases wrote "gelu", and mean the approximation."""
    assert config_from(settings).activation == "gelu_pytorch_tanh", (
        "the config says which activation the model computes: kernels for silu look there"
    )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_act": "silu"}, "hidden_act='silu'"),
        ({"hidden_act": "relu"}, "hidden_act='relu'"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ({"num_key_value_heads": 3}, "=16 is not a multiple of num_key_value_heads=3"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(change, named):
    assert named in refusal(RAW | change), (
        "what is not computed is refused, and never ignored, in words that name the field and its value"
    )
