"""The engines that Part 18's benchmarks and demo compare: with adapters in slots, merged, or with none."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from engine.cache.paged import PagedCache
from engine.decoding.logprobs import SUPPORTS
from engine.decoding.params import SamplingParams
from engine.executor import ModelForward
from engine.layers.packed_linear import pack_linears
from engine.layers.replace import linear_names
from engine.llm_engine import LLMEngine
from engine.lora.adapter import read_adapter
from engine.lora.forward import AdapterForward
from engine.lora.manager import AdapterManager
from engine.lora.merge import merge
from engine.lora.slots import AdapterSlots
from engine.models.loader import load_model
from engine.scheduling.continuous import ContinuousScheduler
from engine.scoring import ScoringExecutor
from engine.tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent
MODEL = "storyteller"
ADAPTERS = ROOT / "adapters"  # poetry, business
BUDGET, BLOCK = 512, 16


def engine_with_slots(
    seats: int, max_loras: int = 4, max_rank: int = 16, device: str = "cpu", model: str | Path = MODEL,
    load_format: str = "auto",
) -> tuple[LLMEngine, AdapterManager]:  # fmt: skip
    """An engine whose requests may have adapters; none is loaded yet."""
    slots = AdapterSlots(max_loras, max_rank, BUDGET)
    transform = partial(_packed, wrap=slots.wrap, rows=seats)
    return _engine(load_model(model, device, load_format=load_format, transform=transform), seats, slots)


def engine_without(seats: int, adapter: Path | None = None, full: bool = False, **where) -> LLMEngine:
    """An engine without slots; `adapter` is merged into the weights. `full`: these are no fp16 numbers, as
    merged ones are none, so packing cannot keep them as such.
    """

    def merged(model):
        for name in linear_names(model) if full else ():
            model.get_submodule(name).weight.data.mul_(1 + 2**-20)
        return merge(model, read_adapter(adapter, model.config)) if adapter else model

    transform = partial(_packed, wrap=merged, rows=seats)
    return _engine(load_model(where.pop("model", MODEL), transform=transform, **where), seats, None)[0]


def _packed(model, wrap, rows: int):
    return pack_linears(wrap(model), rows=rows)


def _engine(model, seats: int, slots: AdapterSlots | None):
    parameter = next(model.parameters())
    cache = PagedCache(
        model.config, seats * 256 // BLOCK, BLOCK, parameter.device, parameter.dtype,
        enable_prefix_caching=False,
    )  # fmt: skip
    scheduler = ContinuousScheduler(cache, seats, BUDGET)
    manager = AdapterManager(slots, scheduler) if slots else None
    forward = ModelForward(model, cache)
    tokenizer = Tokenizer.from_pretrained(MODEL)
    engine = LLMEngine(
        tokenizer, model.config, scheduler,
        ScoringExecutor(AdapterForward(forward, slots) if slots else forward, tokenizer),
        supports=SUPPORTS | {"adapter"}, max_model_len=256, adapters=manager or (),
    )  # fmt: skip
    return engine, manager


def add(
    engine: LLMEngine, prompts: Sequence, keys: Sequence[str | None], tokens: int, temperature: float = 0
) -> None:
    """A request for each (prompt, adapter); its draws are the same each time."""
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=tokens, ignore_eos=not temperature)
    for i, (prompt, key) in enumerate(zip(prompts, keys, strict=True)):
        engine.add_request(str(i), prompt, params, adapter=key)
