"""`attention=` and `--attention`: the same story with each, and a clear line where one cannot run."""

import os
import subprocess

import pytest
import torch

from engine import LLM, SamplingParams
from engine.wiring.engine_args import EngineArgs
from tests.system.ready import ruvon

PARAMS = SamplingParams(temperature=0, max_tokens=25)
PROMPTS = ["Once upon a time", "It rained. " * 30, "The"]
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="triton runs where there is a CUDA GPU")


def without_interpreter(*arguments: str) -> subprocess.CompletedProcess:
    """`ruvon` without Triton's interpreter."""
    return ruvon(
        *arguments, env={key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    )


def told(attention: str) -> list[list[int]]:
    outputs = LLM("storyteller", attention=attention).generate(PROMPTS, PARAMS)
    return [output.outputs[0].token_ids for output in outputs]


def test_every_kernel_tells_the_same_stories():
    eager = told("eager")
    assert told("tiled") == eager
    assert told("sdpa") == eager


def test_an_unknown_name_is_refused_before_a_model_is_loaded():
    with pytest.raises(ValueError, match="attention='flashy': accepted are auto, eager, tiled, sdpa, triton"):
        EngineArgs(model="no-such-model", attention="flashy")


@needs_no_gpu
def test_triton_is_refused_on_a_cpu(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=r"attention='triton' needs .*; eager, tiled, sdpa run here"):
        LLM("storyteller", attention="triton")


@pytest.mark.parametrize("attention", ["tiled", "sdpa"])
def test_generate_takes_a_name(attention):
    done = without_interpreter("generate", PROMPTS[0], "--max-tokens", "25", "--attention", attention)
    (expected,) = LLM("storyteller", max_num_seqs=1).generate(PROMPTS[0], PARAMS)
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected.outputs[0].text + "\n"


@needs_no_gpu
@pytest.mark.parametrize("command", ["generate Hi", "serve --port 0", "demo", "bench latency"])
@pytest.mark.parametrize(
    ("name", "reason"), [("flashy", "accepted are auto, eager, tiled, sdpa, triton"), ("triton", "needs ")]
)
def test_each_command_says_on_one_line_why_it_refuses(command, name, reason):
    done = without_interpreter(*command.split(), "--attention", name)
    assert done.returncode != 0
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith(f"ruvon {command.removesuffix(' Hi').removesuffix(' --port 0')}: ")
    assert f"attention={name!r}" in line
    assert reason in line
