"""The files in engine/zoo are what their model cards say: standard, small, readable by anyone's loader."""

import json

import pytest
from jinja2 import TemplateError
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.models.checkpoint import ZOO

NAMES = ("storyteller", "storyteller-draft")
FILES = (
    "config.json generation_config.json model.safetensors tokenizer.json vocab.json merges.txt "
    "tokenizer_config.json README.md training.json"
)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ZOO / "storyteller")


@pytest.mark.parametrize("name", NAMES)
def test_a_model_folder_holds_the_standard_files_and_no_others(name):
    assert {file.name for file in (ZOO / name).iterdir()} == set(FILES.split())


@pytest.mark.parametrize(("name", "limit"), [("storyteller", 16_000_000), ("storyteller-draft", 5_000_000)])
def test_a_model_is_as_small_on_disk_as_promised(name, limit):
    assert sum(file.stat().st_size for file in (ZOO / name).iterdir()) <= limit


@pytest.mark.parametrize(("name", "layers"), [("storyteller", 6), ("storyteller-draft", 1)])
def test_transformers_loads_a_model_as_it_is(name, layers):
    model, info = AutoModelForCausalLM.from_pretrained(ZOO / name, output_loading_info=True)
    config = model.config
    assert (config.model_type, config.n_layer, config.n_positions) == ("gpt2", layers, 1024)
    assert (config.activation_function, config.tie_word_embeddings) == ("gelu_new", True)
    assert (config.vocab_size, config.eos_token_id) == (4096, 0)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


@pytest.mark.parametrize("name", NAMES)
def test_every_weight_is_fp16_and_finite(name):
    with safe_open(ZOO / name / "model.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.offset_keys()}
    assert {str(tensor.dtype) for tensor in tensors.values()} == {"torch.float16"}
    assert all(tensor.isfinite().all() for tensor in tensors.values())


@pytest.mark.parametrize("file", ["tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json"])
def test_both_models_share_one_tokenizer(file):
    assert (ZOO / NAMES[0] / file).read_bytes() == (ZOO / NAMES[1] / file).read_bytes()


def test_encoding_adds_no_token_at_either_end(tokenizer):
    ids = tokenizer("Once upon a time")["input_ids"]
    assert 0 not in ids
    assert tokenizer.decode(ids) == "Once upon a time"


def test_the_special_tokens_are_the_first_three_ids(tokenizer):
    assert tokenizer.encode("<|endoftext|><|user|><|assistant|>") == [0, 1, 2]


def test_the_chat_template_writes_turns_as_they_were_trained(tokenizer):
    turns = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "A story"},
        {"role": "assistant", "content": "Once."},
        {"role": "user", "content": "More"},
    ]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == "<|user|>Be kind.\nA story<|assistant|>Once.<|endoftext|><|user|>More<|assistant|>"


def test_the_chat_template_refuses_a_role_by_name(tokenizer):
    with pytest.raises(TemplateError, match="tool"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


@pytest.mark.parametrize("name", NAMES)
def test_a_card_tells_how_its_model_was_trained(name):
    training = json.loads((ZOO / name / "training.json").read_text())
    assert {"seed", "steps", "seconds", "curve", "machine"} <= training.keys()
    card = (ZOO / name / "README.md").read_text()
    assert "TinyStories" in card or "storyteller's" in card
    assert "-->?<!--" not in card  # every figure was filled in
