"""Folders of models in a true shape without weights, for `load_format="dummy"`: no download."""

import json
import shutil
from pathlib import Path

from engine.models.checkpoint import ZOO
from engine.models.config import ModelConfig

GPT2_XL = {
    "model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25, "n_positions": 1024,
    "vocab_size": 50257, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
    "eos_token_id": 50256, "dtype": "bfloat16",
}  # fmt: skip

GPT3_6_7B = GPT2_XL | {"n_embd": 4096, "n_layer": 32, "n_head": 32, "n_positions": 2048}


def no_model(max_positions: int) -> ModelConfig:
    """For engines whose logits are handed out ready-made: a cache of it costs next to nothing."""
    return ModelConfig(
        model_type="none", vocab_size=4096, hidden_size=1, num_layers=1, num_heads=1, num_kv_heads=1,
        head_dim=1, intermediate_size=1, max_positions=max_positions, norm_eps=0.0, activation="none",
        tie_word_embeddings=True,
    )  # fmt: skip


def dummy_folder(folder: Path, config: dict) -> Path:
    """A config.json and a tokenizer."""
    (folder / "config.json").write_text(json.dumps(config))
    add_tokenizer(folder, config["vocab_size"])
    return folder


def add_tokenizer(folder: Path, vocab_size: int) -> None:
    """storyteller's, with tokens that no text has up to `vocab_size` of them."""
    tokenizer = json.loads((ZOO / "storyteller" / "tokenizer.json").read_text())
    known = tokenizer["model"]["vocab"]
    known |= {f"<unused{i}>": i for i in range(len(known), vocab_size)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    shutil.copy(ZOO / "storyteller" / "tokenizer_config.json", folder)


def llama_110m(folder: Path) -> Path:
    """A Llama of 110M parameters (12 layers of 768, 12 heads, a tied head of 32,000 tokens) with random
    weights in fp32, saved by Hugging Face.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
        num_key_value_heads=12, vocab_size=32000, max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    add_tokenizer(folder, config.vocab_size)
    return folder
