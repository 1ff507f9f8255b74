"""`tools/compare_models.py`: its table, its file, and its verdict."""

import json

import pytest

from benchmarks.part20_models import random_model
from tests.part01 import reference
from tools import compare_models

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
