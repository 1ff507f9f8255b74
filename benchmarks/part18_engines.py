"""The engines that Part 18's benchmarks and demo compare: with adapters in slots, merged, or with none."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from engine.cache.memory import PageMemory
from engine.core.llm_engine import LLMEngine
from engine.decoding.logprobs import SUPPORTS
from engine.decoding.params import SamplingParams
from engine.execution.runner import EagerWay, ModelRunner
from engine.execution.scores import logprobs_of
from engine.layers.packed_linear import pack_linears
from engine.layers.replace import linear_names
from engine.lora.adapter import read_adapter
from engine.lora.manager import AdapterManager
from engine.lora.merge import merge
from engine.lora.slots import AdapterSlots
from engine.models.loader import load_model
from engine.scheduling.continuous import ContinuousScheduler
from engine.scheduling.scored_rows import scored_rows
from engine.text.tokenizer import Tokenizer

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
    memory = PageMemory(model.config, seats * 256 // BLOCK, BLOCK, parameter.device, parameter.dtype)
    scheduler = ContinuousScheduler(
        memory.plan(enable_prefix_caching=False), seats, BUDGET,
        adapter_slots=slots, select_rows=scored_rows,
    )  # fmt: skip
    manager = AdapterManager(slots, scheduler) if slots else None
    tokenizer = Tokenizer.from_pretrained(MODEL)
    runner = ModelRunner(
        [EagerWay(model, memory)], memory, before=[slots.prepare] if slots else [],
        scores=logprobs_of(tokenizer, model.logits),
    )  # fmt: skip
    engine = LLMEngine(
        tokenizer, model.config, scheduler, runner,
        supports=SUPPORTS | {"adapter"}, max_model_len=256, adapters=manager,
    )  # fmt: skip
    return engine, manager


def add(
    engine: LLMEngine, prompts: Sequence, names: Sequence[str | None], tokens: int, temperature: float = 0
) -> None:
    """A request for each (prompt, adapter's name); its draws are the same each time."""
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=tokens, ignore_eos=not temperature)
    for i, (prompt, name) in enumerate(zip(prompts, names, strict=True)):
        engine.add_request(str(i), prompt, params, adapter=name)
