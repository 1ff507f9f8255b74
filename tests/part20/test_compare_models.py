"""`tools/compare_models.py`: its table, its file, and its verdict."""

import json

import pytest
import torch

from benchmarks.part20_models import random_model
from engine.attention.dense import causal
from engine.models.loader import load_model
from tests.part01 import reference
from tools import compare_models
from tools.first_difference import first_difference

EQUAL = {"max_difference": 1e-6, "allowed": 2e-6, "same_top5": 1.0, "greedy_same": 8, "greedy_of": 8}


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_checkpoint_is_compared_in_each_dtype(family, tmp_path, capsys):
    folder = reference.save(random_model(family, initializer_range=0.1), tmp_path / family)
    assert compare_models.main([str(folder), "--tokens", "32", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / f"compare_{family}.json").read_text())
    assert list(found["figures"]) == ["float32", "bfloat16", "float16"]
    assert compare_models.is_equal(found["figures"]["float32"])
    for dtype, figures in found["figures"].items():
        assert (figures["greedy_of"], figures["allowed"] is None) == (8, dtype != "float32")
        assert figures["max_difference"] <= max(2 * figures["hf_eager_to_sdpa"], 2.3e-5)
    shown = capsys.readouterr().out
    assert all(dtype in shown for dtype in found["figures"])
    difference = found["figures"]["float32"]["max_difference"]
    assert f"{difference:.3g}" in shown, "a number is cut off"


@pytest.mark.parametrize("change", [{"max_difference": 3e-6}, {"same_top5": 0.99}, {"greedy_same": 7}])
def test_what_differs_is_not_equal(change):
    assert compare_models.is_equal(EQUAL)
    assert not compare_models.is_equal(EQUAL | change)


def test_a_model_that_differs_fails(tmp_path, monkeypatch):
    ours = compare_models.our_logits
    monkeypatch.setattr(compare_models, "our_logits", lambda *given: ours(*given) * 1.01)
    folder = reference.save(random_model("llama"), tmp_path / "llama")
    arguments = [str(folder), "--tokens", "16", "--dtypes", "float32", "--out", str(tmp_path)]
    assert compare_models.main(arguments) == 1


def test_a_checkpoint_that_is_not_there_is_said_in_a_line(tmp_path):
    with pytest.raises(SystemExit, match="compare_models: no model folder at ") as caught:
        compare_models.main([str(tmp_path / "none"), "--out", str(tmp_path)])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ("embed", "the embedding by"),
        ("blocks.0.norm1", "layer 0: norm1 by"),
        ("blocks.1.attention.proj", "layer 1: attention by"),
        ("blocks.1.mlp.down", "layer 1: mlp by"),
        ("norm", "the norm behind all layers by"),
        ("head", "the output layer by"),
    ],
)
def test_the_first_part_that_differs_is_named(part, named, tmp_path):
    theirs = random_model("llama")
    ours = load_model(reference.save(theirs, tmp_path / "llama"))
    ids = torch.arange(20)
    assert first_difference(ours, theirs, ids, causal) is None, "the same weights: nothing differs"
    ours.get_submodule(part).weight.mul_(1.5)
    where = first_difference(ours, theirs, ids, causal)
    assert where is not None
    assert where.startswith(named), "the first part that differs, and not a later one"


def test_a_model_that_differs_says_where(tmp_path, monkeypatch, capsys):
    def wrong(*given):
        model = load_model(*given)
        model.get_submodule("blocks.1.mlp.down").weight.mul_(1.5)
        return model

    monkeypatch.setattr(compare_models, "load_model", wrong)
    folder = reference.save(random_model("llama"), tmp_path / "llama")
    arguments = [str(folder), "--tokens", "16", "--dtypes", "float32", "--out", str(tmp_path)]
    assert compare_models.main(arguments) == 1
    assert "The first that differs: layer 1: mlp by" in capsys.readouterr().out
