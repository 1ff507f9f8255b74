"""Tiny random models of Hugging Face's, saved with a tokenizer, and how ours is compared with them."""

from pathlib import Path

import torch
import transformers

from benchmarks.part20_models import SHAPE
from tests.part01 import reference

CLASSES = {
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "gemma": ("GemmaConfig", "GemmaForCausalLM"),
}


def random_model(family: str, seed: int = 0, **settings) -> transformers.PreTrainedModel:
    """Large random weights, so that every part of the arithmetic shows in the logits."""
    make_config, make = (getattr(transformers, name) for name in CLASSES[family])
    torch.manual_seed(seed)
    model = make(make_config(**SHAPE | settings)).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # biases and norms start as zeros and ones, which would hide a mistake
            torch.nn.init.normal_(parameter, parameter.mean().item(), 0.1)
    return model


def saved(family: str, folder: Path, **settings) -> tuple[Path, transformers.PreTrainedModel]:
    """A folder that our loader takes, and Hugging Face's object of it."""
    theirs = random_model(family, **settings)
    return reference.save(theirs, folder, tokenizer=True), theirs


def random_ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(300, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
