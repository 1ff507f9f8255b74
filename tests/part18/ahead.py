"""Engines that launch a step before they land the last one, over the wrapped model."""

import pytest
import torch

from engine.ahead import AheadEngine, AheadExecutor, AheadForward, LastTokens
from engine.cache.paged import PagedCache
from engine.decoding.sampling import SUPPORTS
from engine.lora.forward import AdapterForward
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
            patch.setattr(AdapterSlots, "_rows", lambda self, device: make)
            model, slots = adapted_model(base, max_loras)
    else:
        model, slots = adapted_model(base, max_loras)
    cache, last = PagedCache(model.config, blocks, P), LastTokens(seats, torch.device("cpu"))
    if graphs:
        from engine.graphs import GraphForward

        inner = GraphForward(model, cache, last, model.config.max_positions, capture=False)
        options = {"sampler": inner.choose}
    else:
        inner, options = AheadForward(model, cache, last), {}
    scheduler = ContinuousScheduler(cache, seats, MAX_TOKENS)
    manager = AdapterManager(slots, scheduler)
    executor = AheadExecutor(AdapterForward(inner, slots), TOKENIZER, last, **options)
    engine = AheadEngine(
        TOKENIZER, model.config, scheduler, executor, supports=SUPPORTS | {"adapter"}, adapters=manager
    )
    return engine, manager
