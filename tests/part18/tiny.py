"""A tiny random GPT-2, random adapters for it that PEFT has saved, and engines over them."""

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine.cache.memory import PageMemory
from engine.core.llm_engine import LLMEngine
from engine.decoding.params import SamplingParams
from engine.decoding.sampling import SUPPORTS
from engine.execution.runner import EagerWay, ModelRunner
from engine.execution.scores import logprobs_of
from engine.lora.adapter import Adapter, Factors, read_adapter
from engine.lora.manager import AdapterManager
from engine.lora.slots import AdapterSlots
from engine.models.config import ModelConfig
from engine.models.loader import load_model
from engine.scheduling.continuous import ContinuousScheduler
from engine.scheduling.scored_rows import scored_rows
from tests.part01.reference import random_gpt2, save
from tests.part06.fakes import TOKENIZER

P, MAX_RANK, MAX_TOKENS = 4, 4, 24
V = TOKENIZER.vocab_size
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = "a tale of two"
ALL = ["c_attn", "c_proj", "c_fc"]
# Of different ranks, layers and scales: whoever mixes them up computes something else.
KINDS = {
    "poetry": {"r": 4, "lora_alpha": 8, "target_modules": ALL, "seed": 1},
    "business": {"r": 2, "lora_alpha": 3, "target_modules": ["c_attn", "mlp.c_proj"], "seed": 2},
    "stable": {"r": 3, "lora_alpha": 2, "target_modules": ALL, "use_rslora": True, "seed": 3},
}


@lru_cache
def base(folder: Path) -> Path:
    """A random GPT-2 with the fake tokenizer's vocabulary, saved by Hugging Face."""
    return save(random_gpt2(vocab_size=V), folder / "base")


def save_adapter(base: Path, folder: Path, seed: int = 0, **config) -> Path:
    """An adapter with random numbers in A and B, as PEFT saves it."""
    torch.manual_seed(seed)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        LoraConfig(task_type="CAUSAL_LM", fan_in_fan_out=True, **config),
    )
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return folder


def theirs(base: Path, adapter: Path | None = None, merged: bool = False) -> torch.nn.Module:
    """What PEFT and Hugging Face compute."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
        model = model.merge_and_unload() if merged else model
    return model.eval()


@torch.inference_mode()
def their_logits(model: torch.nn.Module, token_ids: Sequence[int]) -> Tensor:
    """token_ids[T] -> [T, V]"""
    return model(torch.tensor([list(token_ids)])).logits[0]


def edited(folder: Path, **fields) -> Path:
    """Other settings in adapter_config.json; `...` takes one away."""
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))
    return folder


def by_hand(config: ModelConfig, rank: int = 1, value: float = 1.0, scale: float = 1.0) -> Adapter:
    """An adapter for the first layer's MLP, without a file."""
    into, out = config.hidden_size, config.intermediate_size
    factors = Factors(torch.full((rank, into), value), torch.full((out, rank), value))
    return Adapter(rank, scale, {"blocks.0.mlp.up": (factors,)})


def adapted_model(base: Path, max_loras: int, transform=lambda model: model):
    """(the model, wrapped, and its slots); `transform` comes behind the wrapping, as packing does."""
    slots = AdapterSlots(max_loras, MAX_RANK, MAX_TOKENS)
    return load_model(base, transform=lambda model: transform(slots.wrap(model))), slots


def composed(base: Path, max_loras: int = 2, seats: int = 4, blocks: int = 60, engine=LLMEngine, **options):
    """(engine, manager) over the wrapped model, with pages and a prefix cache."""
    model, slots = adapted_model(base, max_loras)
    memory = PageMemory(model.config, blocks, P)
    scheduler = ContinuousScheduler(
        memory.plan(), seats, MAX_TOKENS, adapter_slots=slots, select_rows=scored_rows
    )
    manager = AdapterManager(slots, scheduler)
    scores = logprobs_of(TOKENIZER, model.logits)
    runner = ModelRunner([EagerWay(model, memory)], memory, before=[slots.prepare], scores=scores)
    supports = SUPPORTS | {"adapter", "logprobs", "prompt_logprobs", "cache_salt"}
    composition = engine(
        TOKENIZER, model.config, scheduler, runner, supports=supports, adapters=manager, **options
    )
    return composition, manager


def load(manager: AdapterManager, name: str, folder: Path, config: ModelConfig, **options) -> str:
    return manager.load(name, read_adapter(folder, config, MAX_RANK), **options)
