"""Random GPT-2s made by Hugging Face, and what Hugging Face computes with them."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from engine.models.checkpoint import ZOO


def random_gpt2(seed: int = 0, **settings) -> GPT2LMHeadModel:
    """A GPT-2 with large random weights, so that every part of the arithmetic shows in the logits."""
    torch.manual_seed(seed)
    shape = {
        "vocab_size": 300,
        "n_embd": 48,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "initializer_range": 0.2,
    }
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(**shape | ends | settings)).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # biases and norms start as zeros and ones, which would hide a mistake
            torch.nn.init.normal_(parameter, parameter.mean().item(), 0.1)
    return model


def save(model: PreTrainedModel, folder: Path, tokenizer: bool = False, **settings) -> Path:
    """Save as Hugging Face does; with `tokenizer`, the embedded one beside it."""
    model.save_pretrained(folder, **settings)
    for name in ("tokenizer.json", "tokenizer_config.json") if tokenizer else ():
        shutil.copy(ZOO / "storyteller" / name, folder)
    return folder


def load(name: str) -> PreTrainedModel:
    """An embedded model, a folder or a hub id, in fp32."""
    folder = ZOO / name
    return AutoModelForCausalLM.from_pretrained(
        folder if folder.is_dir() else name, dtype=torch.float32
    ).eval()


@torch.inference_mode()
def logits(model: PreTrainedModel, token_ids: Sequence[int]) -> Tensor:
    """token_ids[T] -> [T, V]"""
    return model(torch.tensor([list(token_ids)])).logits[0]


def generate(model: PreTrainedModel, token_ids: Sequence[int], **settings) -> list[int]:
    """The tokens that greedy search puts behind token_ids."""
    prompt = torch.tensor([list(token_ids)])
    settings = {"do_sample": False, "pad_token_id": 0} | settings
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)[
        0, prompt.shape[1] :
    ].tolist()
