"""`import engine` is light, and its names are found when they are first used."""

import subprocess
import sys

import pytest

import engine
from engine.models.checkpoint import ZOO

HEAVY = ["transformers", "fastapi", "triton", "streamlit", "tokenizers", "huggingface_hub"]


def modules_after(code: str, before: str = "") -> set[str]:
    """What `code` imports that is not there after `before`."""
    code = f"{before}\nimport sys; old = set(sys.modules)\n{code}\nprint(*set(sys.modules) - old)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ZOO.parents[1], capture_output=True, encoding="utf-8", check=True,
    )  # fmt: skip
    return set(done.stdout.split())


def test_importing_the_engine_imports_nothing_heavy_nor_torch():
    assert not modules_after("import engine") & {*HEAVY, "torch"}


def test_loading_an_embedded_model_imports_nothing_heavy():
    code = "from engine import *; load_model('storyteller-draft'); Tokenizer.from_pretrained('storyteller')"
    # torch itself may look for triton; it must not be ours that asks
    assert not modules_after(code, before="import torch") & set(HEAVY)


@pytest.mark.parametrize(
    "name", ["Tokenizer", "ModelConfig", "load_model", "CheckpointError", "embedded_models"]
)
def test_a_name_of_part_1_is_the_one_in_its_module(name):
    found = getattr(engine, name)
    assert found.__name__ == name
    assert found.__module__.startswith("engine.")
    assert name in dir(engine)
    assert name in engine.__all__


def test_every_listed_name_resolves():
    assert [name for name in engine.__all__ if not hasattr(engine, name)] == []
    namespace: dict = {}
    exec("from engine import *", namespace)
    assert set(engine.__all__) <= set(namespace)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(AttributeError, match=r"no attribute 'Nonsense'.*Tokenizer"):
        engine.Nonsense  # noqa: B018
    with pytest.raises(ImportError):
        from engine import Nonsense  # noqa: F401


def test_a_name_whose_module_a_later_part_adds_says_so_and_is_not_listed(monkeypatch):
    monkeypatch.setitem(engine._HOME, "Later", "not_here.yet")
    with pytest.raises(
        AttributeError, match=r"engine\.Later lives in engine/not_here/yet\.py, which a later part adds"
    ):
        engine.Later  # noqa: B018
    assert "Later" not in dir(engine)
