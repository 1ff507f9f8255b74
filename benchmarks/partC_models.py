"""Tiny random models of any family that the library transformers knows, for Extension C's demo, notebook and
tests.
"""

import shutil
from pathlib import Path
from typing import Any

import torch

from engine.models.checkpoint import ZOO

# Sizes that most configurations know by these names. Large random weights, so that logits lie far apart.
SMALL = {
    "vocab_size": 4096, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "initializer_range": 0.2, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip


def tiny(model_type: str, folder: Path, seed: int = 0, **settings: Any) -> Any:
    """A random model of the size SMALL, with other `settings` where given, saved in `folder` with the
    embedded model's tokenizer. Returns Hugging Face's object of it.
    """
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**SMALL | settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # biases, gains and sinks begin as zeros or ones: that hides mistakes
                parameter.add_(0.1 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ZOO / "storyteller" / name, folder)
    return model
