"""Small Llamas and Qwen3s with random weights, made by Hugging Face, for all that Part 20 shows and tests."""

import copy
from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from benchmarks.shapes import add_tokenizer

SHAPE = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
FAMILIES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}


def random_model(family: str, seed: int = 0, **settings) -> PreTrainedModel:
    """Large random weights, so that every part of the arithmetic shows in the logits."""
    make_config, make = FAMILIES[family]
    shape = SHAPE | ({"head_dim": 12} if family == "qwen3" else {})
    torch.manual_seed(seed)
    model = make(make_config(**shape | settings)).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # biases and norms start as zeros and ones, which would hide a mistake
            torch.nn.init.normal_(parameter, parameter.mean().item(), 0.1)
    return model


# As large as storyteller's vocabulary, whose tokenizer they are given.
READER = {"vocab_size": 4096, "hidden_size": 64, "intermediate_size": 160, "max_position_embeddings": 512}


def reader(family: str, folder: Path) -> PreTrainedModel:
    """A random model that takes text, saved in `folder`, and Hugging Face's object of it."""
    return _saved(random_model(family, **READER, head_dim=16), folder)


@torch.no_grad()
def blurred(model: PreTrainedModel, folder: Path) -> None:
    """The model with every weight moved a little, saved in `folder`: a draft that is often right."""
    twin = copy.deepcopy(model)
    torch.manual_seed(1)
    for parameter in twin.parameters():
        parameter += 0.02 * parameter.std() * torch.randn_like(parameter)
    _saved(twin, folder)


def _saved(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    model.save_pretrained(folder)
    add_tokenizer(folder, READER["vocab_size"])
    return model
