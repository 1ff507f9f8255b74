"""A recording of a few steps, and what computes it again."""

from pathlib import Path

import pytest

from engine import LLM, SamplingParams
from engine.wiring import replay as wiring
from engine.wiring.compose_devices import Devices
from engine.wiring.devices import load_devices
from engine.wiring.replay import args_of
from tests.part03.linears import packing_asks_no_stopwatch  # noqa: F401
from tests.system.recordings import PROMPTS


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    """A recording of a few steps, two sequences in each, on pages and with penalties."""
    file = tmp_path_factory.mktemp("recording") / "run.jsonl"
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=1, repetition_penalty=1.2)
    llm = LLM("storyteller", record=file, max_num_seqs=2, max_model_len=64, max_num_batched_tokens=32)
    llm.generate(PROMPTS[:2], params, use_tqdm=False)
    return file


@pytest.fixture(scope="module")
def devices(recorded) -> Devices:
    return load_devices(args_of(recorded))


@pytest.fixture
def quick(devices, monkeypatch):
    """What computes is made once: it is the same for all recordings here."""
    monkeypatch.setattr(wiring, "load_devices", lambda args: devices)
