"""Random Llamas and Qwen3s made by Hugging Face."""

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

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
