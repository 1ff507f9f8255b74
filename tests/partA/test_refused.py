"""What cannot be had with several ranks is refused in a line, before a process is started."""

from types import SimpleNamespace

import pytest

from benchmarks.part20_models import random_model
from engine import LLM, EngineArgs
from engine.models.checkpoint import CheckpointError
from engine.models.loader import load_model
from engine.parallel.launch import Workers
from engine.parallel.shards import Shards
from engine.wiring import compose
from tests.part01 import reference
from tests.system.ready import ruvon

TWO = {"tensor_parallel_size": 2, "device": "cpu"}


@pytest.fixture(autouse=True)
def no_process(monkeypatch):
    def start(*_):
        raise AssertionError("a process was started")

    monkeypatch.setattr(Workers, "__init__", start)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"tensor_parallel_size": 3},
            r"=3 does not divide num_heads=4; accepted for this model are 1, 2, 4$",
        ),
        ({"quantization": "int8_dynamic"}, "is not supported with tensor_parallel_size=2; int8 and int4 are"),
        ({"device": "cuda:0"}, "names one GPU"),
    ],
)
def test_a_combination(options, words):
    with pytest.raises((CheckpointError, ValueError), match=words):
        LLM("storyteller", **TWO | options)


def test_groups_that_would_be_cut(tmp_path):
    """Of 96 inputs each rank has 48, and a group of int4 has 64."""
    folder = reference.save(random_model("llama", hidden_size=96), tmp_path, tokenizer=True)
    with pytest.raises(
        ValueError, match=r"quantization='int4' with .*: each rank has 48 of num_heads · head_dim"
    ):
        LLM(folder, quantization="int4", **TWO)
    heads = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    narrow = reference.save(
        random_model("llama", **heads, intermediate_size=192), tmp_path / "narrow", tokenizer=True
    )
    with pytest.raises(ValueError, match="each rank has 96 of intermediate_size"):
        LLM(narrow, quantization="int4", **TWO)


def test_a_quantized_checkpoint(tmp_path):
    pytest.importorskip("engine.quantization.checkpoint").main(
        ["storyteller", str(tmp_path / "int8"), "--quantization", "int8"]
    )
    with pytest.raises(CheckpointError, match="is quantized, and is loaded on one device only"):
        LLM(tmp_path / "int8", **TWO)
    with pytest.raises(CheckpointError, match="is quantized, and is loaded on one device only"):
        load_model(tmp_path / "int8", sharding=Shards(0, 2))


def test_fewer_gpus_than_ranks(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(
        ValueError, match="tensor_parallel_size=2: there are 1 GPUs here, and each rank needs one"
    ):
        LLM("storyteller", tensor_parallel_size=2, device="cuda")


@pytest.mark.parametrize("value", [0, -1, 1.5, "two"])
def test_a_number_that_is_none(value):
    with pytest.raises(ValueError, match="tensor_parallel_size"):
        EngineArgs(tensor_parallel_size=value)


def test_an_engine_that_cannot_be_made_leaves_no_rank(monkeypatch):
    ended = []
    devices = SimpleNamespace(executor=SimpleNamespace(shutdown=lambda: ended.append(True)))
    monkeypatch.setattr(compose, "load_devices", lambda args: devices)
    with pytest.raises(AttributeError):  # these devices have nothing else
        compose.build_engine(EngineArgs())
    assert ended == [True]


def test_on_the_command_line():
    done = ruvon("serve", "--tensor-parallel-size", "5", "--device", "cpu")
    assert done.returncode == 1
    assert "does not divide num_heads=4" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
