"""`tools/compare_models.py` on models of Extension C: with windows, and with a wrong Gemma."""

import pytest
import torch

from engine.attention.dense import causal
from engine.models import gemma, llama
from engine.models.loader import load_model
from tests.part01 import reference
from tests.partC.models import random_model, saved
from tools import compare_models
from tools.first_difference import first_difference


@pytest.mark.parametrize(
    ("family", "settings"), [("mistral", {"sliding_window": 6}), ("qwen2", {}), ("gemma", {"head_dim": 12})]
)
def test_a_checkpoint_is_equal(family, settings, tmp_path):
    theirs = random_model(family, **settings | {"initializer_range": 0.1})
    folder = reference.save(theirs, tmp_path / family)
    arguments = [str(folder), "--tokens", "32", "--dtypes", "float32", "--out", str(tmp_path)]
    assert compare_models.main(arguments) == 0


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ("Model.embedded", "the embedding by"),
        ("RMSNorm.forward", "layer 0: norm1 by"),
        ("MLP.forward", "layer 0: mlp by"),
    ],
)
def test_a_part_that_is_still_llamas_is_named(wrong, named, tmp_path, monkeypatch):
    cls, _, method = wrong.partition(".")
    monkeypatch.setattr(getattr(gemma, cls), method, getattr(getattr(llama, cls), method))
    folder, theirs = saved("gemma", tmp_path, seed=1, head_dim=12)
    where = first_difference(load_model(folder), theirs, torch.arange(20), causal)
    assert where is not None
    assert where.startswith(named), "the first part that differs is the one that is wrong"
