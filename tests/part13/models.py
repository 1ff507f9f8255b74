"""Random GPT-2 models, small enough for Triton's interpreter, whose norms and biases do something."""

from pathlib import Path

import torch


def save_gpt2(folder: Path, vocab_size=67, width=24, layers=2, heads=3, positions=256, **options) -> Path:
    """The folder, with a checkpoint that Hugging Face wrote."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=vocab_size, n_positions=positions, n_embd=width, n_layer=layers, n_head=heads, **options
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.05, 0.3)
    model.save_pretrained(folder)
    return folder
