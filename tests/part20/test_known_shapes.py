"""Shapes of known models: their numbers of parameters, and a run with random weights."""

from dataclasses import replace

import pytest

from engine import LLM, SamplingParams, embedded_models
from engine.models.config import ModelConfig, architecture
from engine.models.known_shapes import SHAPES, known_shapes, shape_folder
from engine.wiring.engine_args import EngineArgs

PARAMETERS = {  # as their makers count them: a tied head is counted once
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "qwen3-0.6b": 596_049_920,
    "qwen3-4b": 4_022_468_096,
    "tinyllama-1.1b-chat-v1.0": 1_100_048_384,
}


def test_each_shape_is_here_once_and_is_no_embedded_model():
    assert known_shapes() == sorted(PARAMETERS)
    assert not set(known_shapes()) & set(embedded_models())


@pytest.mark.parametrize(("name", "number"), PARAMETERS.items())
def test_a_shape_has_as_many_parameters_as_the_model(name, number):
    config = ModelConfig.from_pretrained(SHAPES / name)
    model = architecture(config.model_type).Model(config, device="meta")  # no memory
    assert sum(parameter.numel() for parameter in model.parameters()) == number


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("qwen3-0.6b", "qwen3-0.6b"),
        ("Qwen/Qwen3-0.6B", "qwen3-0.6b"),
        ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "tinyllama-1.1b-chat-v1.0"),
        ("qwen3-0.7b", None),
        ("storyteller", None),
        ("", None),
    ],
)
def test_a_shape_is_found_by_the_name_that_the_hub_has(name, folder):
    assert shape_folder(name) == (SHAPES / folder if folder else None)


def test_a_folder_of_the_users_goes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2-xl").touch()
    assert shape_folder("gpt2-xl") is not None, "a file is no folder"
    assert shape_folder("gpt2") is not None
    (tmp_path / "gpt2").mkdir()
    assert shape_folder("gpt2") is None


def test_only_random_weights_make_a_name_a_shape():
    args = EngineArgs(model="gpt2")
    assert (args.model, args.tokenizer) == ("gpt2", None)
    dummy = EngineArgs(model="gpt2", load_format="dummy")
    assert (dummy.model, dummy.tokenizer) == (SHAPES / "gpt2", "storyteller")
    assert replace(dummy, block_size=8).model == SHAPES / "gpt2"
    assert EngineArgs(model="gpt2", load_format="dummy", tokenizer="mine").tokenizer == "mine"
    assert EngineArgs(model="storyteller", load_format="dummy").model == "storyteller"


def test_a_shape_runs(monkeypatch, tmp_path):
    """A small one in the place of the known ones, which take a while."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(
        '{"model_type": "qwen3", "vocab_size": 5000, "hidden_size": 32, "intermediate_size": 48,'
        ' "head_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,'
        ' "max_position_embeddings": 128}'
    )
    monkeypatch.setattr("engine.models.known_shapes.SHAPES", tmp_path)
    llm = LLM("someone/Tiny", load_format="dummy", device="cpu")
    (output,) = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 5
