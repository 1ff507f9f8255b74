"""What cannot be had with several ranks is refused in a line, before a process is started; what others start
with, and what the doctor says could be had.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from benchmarks.part20_models import random_model
from engine import LLM, EngineArgs
from engine.cli.many_devices import findings
from engine.models.checkpoint import CheckpointError
from engine.models.config import ModelConfig
from engine.models.loader import load_model
from engine.parallel.launch import RankLost, Workers
from engine.parallel.shards import Shards
from engine.wiring import compose, compose_cache, many_devices
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


def test_the_doctor_says_which_numbers_of_ranks_a_model_may_have(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    (message,) = [finding.message for finding in findings() if finding.name == "several devices"]
    assert "storyteller on 1, 2, 4;" in message, "4 heads"
    assert message.endswith("; here on the CPU, a process for each")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert any(finding.message.endswith("; 4 GPUs here") for finding in findings())


def test_ranks_on_one_machine_divide_its_memory_among_them(monkeypatch):
    """A share of the machine's memory is all ranks' together, and not each one's."""
    monkeypatch.setattr(compose_cache, "free_and_total_memory", lambda device: (2**20, 2**21))
    parameter, config = torch.zeros(1), ModelConfig.from_pretrained("storyteller")
    sizes = compose_cache.Sizes(max_num_seqs=100, max_num_batched_tokens=100, max_model_len=512)
    for share, of_all in {0.25: 2**18, None: int(compose_cache.MEMORY_SHARE * 2**20)}.items():
        args = EngineArgs(gpu_memory_utilization=share)
        told = [compose_cache.kv_cache_bytes(args, [config], sizes, parameter, size) for size in (1, 2, 4)]
        assert told == [of_all, of_all // 2, of_all // 4]


def test_on_the_command_line():
    done = ruvon("serve", "--tensor-parallel-size", "5", "--device", "cpu", "--port", "0")
    assert done.returncode == 1
    assert "does not divide num_heads=4" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("device", "places", "backend"),
    [("cpu", ["cpu"] * 3, "gloo"), ("cuda", ["cuda:0", "cuda:1", "cuda:2"], "nccl")],
)
def test_what_another_rank_is_told(device, places, backend, monkeypatch):
    """Its device and its share of the threads. It writes no recording, and proposes no drafts: it verifies
    as many as rank 0 does, and needs no draft model for that.
    """
    told = []

    class Told(RuntimeError):
        """Ends the start: there is nothing to compute with."""

    def start(_, size, options):
        told.extend(options(rank) for rank in range(1, size))
        raise Told

    monkeypatch.setattr(Workers, "__init__", start)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(many_devices, "divide", lambda config, size: config)
    drafts = {"model": "storyteller-draft", "num_speculative_tokens": 3}
    with pytest.raises(Told):
        LLM("storyteller", device=device, tensor_parallel_size=3, speculative_config=drafts)
    assert [options["args"]["device"] for options in told] == places[1:]
    for options in told:
        assert (options["threads"], options["backend"]) == (2, backend)
        assert options["args"]["speculative_config"] == {"method": "ngram", "num_speculative_tokens": 3}


def test_only_rank_0_writes_the_recording(monkeypatch, tmp_path):
    told = []

    def start(_, size, options):
        told.append(options(1)["args"]["record"])
        raise OSError("no processes are left")

    monkeypatch.setattr(Workers, "__init__", start)
    with pytest.raises(ValueError, match="tensor_parallel_size=2: a process cannot be started: no processes"):
        LLM("storyteller", **TWO, record=str(tmp_path / "record"))
    assert told == [None]


@pytest.mark.parametrize(
    ("error", "raised", "words"),
    [
        (CheckpointError("no such file"), CheckpointError, "^no such file"),
        (KeyboardInterrupt("by hand"), KeyboardInterrupt, "^by hand"),
        (RuntimeError("connection reset"), ValueError, "^tensor_parallel_size=2: rank 1 has ended"),
    ],
)
def test_a_start_that_fails_ends_the_ranks(error, raised, words, monkeypatch):
    """What fails in a sum is another rank's end, and that is told."""
    stopped = []

    class Started:
        store = "ranks"

        def __init__(self, size, options):
            assert size == 2

        def wait_until_ready(self):
            pass

        @contextmanager
        def raising_rank_lost(self):
            try:
                yield
            except Exception as error:
                raise RankLost("rank 1 has ended") from error

        def on_stop(self, callback):
            callback()

        def stop(self):
            stopped.append("ranks")

    def load(args, rank):
        raise error

    group = SimpleNamespace(
        rank=0, size=2, device=torch.device("cpu"), all_reduce_min=None, all_reduce_sum=None
    )
    group.close = lambda: stopped.append("group")
    monkeypatch.setattr(many_devices, "Workers", Started)
    monkeypatch.setattr(many_devices, "Group", lambda *_: group)
    monkeypatch.setattr(many_devices, "load_one_device", load)
    with pytest.raises(raised, match=words):
        many_devices.load_devices(EngineArgs(**TWO))
    assert stopped == ["group", "ranks"], "the group is left at the ranks' end"
