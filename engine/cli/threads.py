"""How many threads a model is run with from the command line. Part 20's wiring."""

from pathlib import Path

from engine.config import ModelConfig

SMALL = 512  # hidden_size


def one_thread_if_small(model: str | Path) -> None:
    """A small model is slower on two threads than on one: benchmarks, part03_kv_cache and one_request."""
    if ModelConfig.from_pretrained(model).hidden_size <= SMALL:
        import torch  # here: what is wrong with the model is said at once

        torch.set_num_threads(1)
