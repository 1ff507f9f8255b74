"""Without a GPU, Triton's kernels run in its interpreter, which must be asked for before they are defined."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from tests.part04.conftest import tokenizer  # noqa: F401


@pytest.fixture
def wide_tiles(monkeypatch):
    """The interpreter takes as long for a tile of many rows as for one of few: few programs, which still
    walk over several tiles where they do on a GPU, and the last tile is not full.
    """
    if torch.cuda.is_available():
        return
    from engine.kernels.single_row import TILES
    from engine.kernels.tiles import Tile

    for name, resident in {"qkv": 2, "proj": None, "up": 2, "down": 1, "head": 2}.items():
        monkeypatch.setitem(TILES, name, Tile(16, 4, resident))
