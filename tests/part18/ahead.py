"""Engines that launch a step before they land the last one, over the wrapped model."""

import pytest
import torch

from engine.cache.memory import PageMemory
from engine.core.ahead import AheadEngine
from engine.decoding.sampling import SUPPORTS
from engine.execution.last_tokens import LastTokens
from engine.execution.runner import EagerWay, ModelRunner, Way
from engine.lora.manager import AdapterManager
from engine.lora.slots import AdapterSlots
from engine.scheduling.continuous import ContinuousScheduler
from tests.part06.fakes import TOKENIZER
from tests.part18.tiny import MAX_TOKENS, P, adapted_model


def composed_ahead(base, max_loras: int = 2, seats: int = 4, blocks: int = 60, graphs: bool = False):
    """(engine, manager); with `graphs`, decode steps and adapters run over fixed buffers, as a graph records
    them.
    """
    if graphs:
        from engine.lora.tiles import TiledRows

        with pytest.MonkeyPatch.context() as patch:
            make = TiledRows(MAX_TOKENS, max_loras, torch.device("cpu"))
            patch.setattr(AdapterSlots, "_make_rows", lambda self, device: make)
            model, slots = adapted_model(base, max_loras)
    else:
        model, slots = adapted_model(base, max_loras)
    memory, last = PageMemory(model.config, blocks, P), LastTokens(seats, torch.device("cpu"))
    ways: list[Way] = [EagerWay(model, memory, upload=last.upload)]
    if graphs:
        from engine.execution.graphs import DecodeGraphs, GraphWay, fastest_steps

        step, width = fastest_steps(model, memory, seats), -(-model.config.max_positions // P)
        decode = DecodeGraphs(step, last, model.config.vocab_size, seats, width, capture=False)
        ways.insert(0, GraphWay(decode, model.config.vocab_size))
    scheduler = ContinuousScheduler(memory.plan(), seats, MAX_TOKENS, adapter_slots=slots)
    manager = AdapterManager(slots, scheduler)
    runner = ModelRunner(ways, memory, before=[slots.prepare], last_tokens=last)
    engine = AheadEngine(
        TOKENIZER, model.config, scheduler, runner, supports=SUPPORTS | {"adapter"}, adapters=manager
    )
    return engine, manager
