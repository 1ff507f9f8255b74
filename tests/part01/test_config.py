"""What is read from config.json, and what is refused."""

import json
import sys
from types import ModuleType

import pytest

from engine.models.checkpoint import ZOO, CheckpointError
from engine.models.config import ModelConfig
from tests.part01 import reference

GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 50257,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_positions": 1024,
}


@pytest.fixture
def read(tmp_path):
    """Writes config.json (and generation_config.json) and reads them with the engine."""

    def read(config: dict | str, generation: dict | None = None) -> ModelConfig:
        text = config if isinstance(config, str) else json.dumps(config)
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
        return ModelConfig.from_pretrained(tmp_path)

    return read


def test_gpt2s_shapes_are_read(read):
    config = read(GPT2)
    assert (config.vocab_size, config.hidden_size, config.num_layers, config.max_positions) == (
        50257,
        768,
        12,
        1024,
    )
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (12, 12, 64)
    assert config.intermediate_size == 3072
    assert (config.activation, config.norm_eps, config.tie_word_embeddings) == ("gelu_new", 1e-5, True)
    assert (config.dtype, config.eos_token_ids) == (None, ())
    assert config.raw == GPT2


def test_what_is_written_wins_over_the_defaults(read):
    config = read(
        GPT2
        | {"n_inner": 100, "activation_function": "relu", "layer_norm_epsilon": 0.1}
        | {"tie_word_embeddings": False, "torch_dtype": "bfloat16"}
    )
    assert (config.intermediate_size, config.activation, config.norm_eps) == (100, "relu", 0.1)
    assert (config.tie_word_embeddings, config.dtype) == (False, "bfloat16")


def test_a_config_saved_by_hugging_face_has_hugging_faces_values(tmp_path):
    model = reference.random_gpt2(n_inner=77, n_head=3, layer_norm_epsilon=1e-4)
    config = ModelConfig.from_pretrained(reference.save(model, tmp_path))
    theirs = model.config
    assert (config.hidden_size, config.num_heads, config.intermediate_size) == (theirs.n_embd, 3, 77)
    assert (config.norm_eps, config.eos_token_ids) == (1e-4, (0,))


def test_the_embedded_models_are_as_promised():
    config = ModelConfig.from_pretrained("storyteller")
    assert (config.model_type, config.max_positions, config.dtype) == ("gpt2", 1024, "float16")
    assert config.raw == json.loads((ZOO / "storyteller" / "config.json").read_text(encoding="utf-8"))
    draft = ModelConfig.from_pretrained("storyteller-draft")
    assert draft.vocab_size == config.vocab_size
    assert draft.num_layers < config.num_layers


@pytest.mark.parametrize(
    ("in_config", "in_generation_config", "expected"),
    [
        (None, None, ()),
        (7, None, (7,)),
        ([7, 8], None, (7, 8)),
        (7, {"eos_token_id": 9}, (9,)),
        (7, {"eos_token_id": [9, 10]}, (9, 10)),
        (7, {}, (7,)),
        (0, {"eos_token_id": None}, (0,)),
        (7, {"eos_token_id": 0}, (0,)),
    ],
)
def test_end_of_sequence_is_one_id_or_several_and_generation_config_wins(
    read, in_config, in_generation_config, expected
):
    assert read(GPT2 | {"eos_token_id": in_config}, in_generation_config).eos_token_ids == expected


@pytest.mark.parametrize("bytes_per_value", [2, 4])
def test_bytes_per_token_count_keys_and_values_of_every_layer(read, bytes_per_value):
    assert read(GPT2).kv_bytes_per_token(bytes_per_value) == 2 * 12 * 768 * bytes_per_value


@pytest.mark.parametrize("model_type", ["bert", "loader", "weights", "no_such", "../gpt2", ""])
def test_an_unsupported_model_type_lists_the_supported_ones(read, model_type):
    with pytest.raises(
        CheckpointError, match=r"config\.json: model_type .* not supported; supported: .*\bgpt2\b"
    ) as caught:
        read(GPT2 | {"model_type": model_type})
    assert repr(model_type) in str(caught.value)
    assert "loader" not in str(caught.value).split("supported: ")[1]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("scale_attn_weights", False),
        ("scale_attn_by_inverse_layer_idx", True),
        ("reorder_and_upcast_attn", True),
        ("add_cross_attention", True),
        ("activation_function", "swish"),
        ("n_head", 7),
    ],
)
def test_a_setting_that_is_not_computed_is_refused_with_file_name_and_value(read, setting, value):
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{setting}='?{value}"):
        read(GPT2 | {setting: value})


@pytest.mark.parametrize("name", [*GPT2])
def test_a_missing_value_is_named(read, name):
    with pytest.raises(CheckpointError, match=rf"config\.json: has no '{name}'"):
        read({key: value for key, value in GPT2.items() if key != name})


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_a_file_that_is_no_json_object_is_named(read, text):
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read(text)


@pytest.mark.parametrize(("name", "value"), [
    ("n_head", 0), ("n_head", "12"), ("n_layer", "12"), ("n_layer", 0), ("n_embd", 76.8), ("n_positions", -1),
    ("vocab_size", None), ("vocab_size", True), ("n_inner", [1]), ("layer_norm_epsilon", "small"),
])  # fmt: skip
def test_a_value_of_another_kind_is_refused_with_the_files_name(read, name, value):
    with pytest.raises(CheckpointError, match=r"config\.json: "):
        read(GPT2 | {name: value})


@pytest.mark.parametrize("ids", ["2", 2.5, [2.5], ["</s>"], {"id": 2}, True])
def test_an_end_of_sequence_that_is_no_id_is_refused(read, ids):
    with pytest.raises(CheckpointError, match=r"config\.json: eos_token_id="):
        read(GPT2 | {"eos_token_id": ids})
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id="):
        read(GPT2, {"eos_token_id": ids})


def test_a_missing_config_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        ModelConfig.from_pretrained(tmp_path)


def test_an_architecture_may_borrow_another_ones_translation(read, monkeypatch):
    """As Qwen3 may take Llama's `config_from`: what a module offers counts, not what its text says."""
    import engine.models
    from engine.models import gpt2

    borrowed = ModuleType("engine.models.gpt2b")
    borrowed.Model, borrowed.config_from, borrowed.places = gpt2.Model, gpt2.config_from, gpt2.places
    monkeypatch.setitem(sys.modules, "engine.models.gpt2b", borrowed)
    monkeypatch.setattr(engine.models, "gpt2b", borrowed, raising=False)
    assert read(GPT2 | {"model_type": "gpt2b"}).num_layers == 12
