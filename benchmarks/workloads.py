"""Workloads that several benchmarks share: seeded, from the story corpus or from random tokens."""

import json
import shutil
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from random import Random

import torch
from safetensors.torch import load_file, save_file

from benchmarks.part06_queue import Records
from benchmarks.shapes import add_tokenizer
from engine.cache.slots import SlotCache, SlotMemory
from engine.core.llm_engine import LLMEngine
from engine.decoding.params import SamplingParams
from engine.execution.runner import EagerWay, ModelRunner
from engine.machine.collector import rare_collections
from engine.models.checkpoint import ZOO
from engine.requests.listeners import Listeners
from engine.scheduling.scheduler import Scheduler
from engine.text.tokenizer import Tokenizer

Job = tuple[list[int], int]  # prompt token ids, output tokens


def jobs(number: int, vocab_size: int, seed: int = 0) -> list[Job]:
    """Prompts of 8 to 128 tokens, outputs of 16 to 128, drawn evenly; which tokens does not matter."""
    random = Random(seed)
    return [
        ([random.randrange(1, vocab_size) for _ in range(random.randint(8, 128))], random.randint(16, 128))
        for _ in range(number)
    ]


def gpt2_like(folder: Path, layers: int, width: int, heads: int, vocab_size: int) -> Path:
    """A folder for `load_model(..., load_format="dummy")`: GPT-2's architecture in this shape.

    Its tokenizer is storyteller's, with tokens that no text has up to `vocab_size`.
    """
    config = json.loads((ZOO / "storyteller" / "config.json").read_text())
    config |= {"n_layer": layers, "n_embd": width, "n_head": heads, "vocab_size": vocab_size}
    (folder / "config.json").write_text(json.dumps(config))
    add_tokenizer(folder, vocab_size)
    return folder


def fp32_twin(folder: Path) -> Path:
    """storyteller with every weight moved a little, so that fp16 cannot hold it, as in a checkpoint that was
    never in fp16.
    """
    shutil.copytree(ZOO / "storyteller", folder, dirs_exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: tensor.float() * (1 + 2e-4 * torch.randn(tensor.shape, generator=generator))
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    return folder


def run_engine(
    model: torch.nn.Module,
    tokenizer: Tokenizer,
    work: list[Job],
    slots: int,
    make_scheduler: Callable[[SlotCache], Scheduler],
    make_memory: Callable[..., SlotMemory] = SlotMemory,
) -> tuple[float, dict[str, float], Records]:
    """Seconds for all, finishing time of each request (seconds from the start), and the steps' records."""
    memory = make_memory(model.config, slots, 256)
    records = Records()
    engine = LLMEngine(
        tokenizer,
        model.config,
        make_scheduler(memory.plan()),
        ModelRunner([EagerWay(model, memory)], memory),
        Listeners([records]),
        max_model_len=256,
    )
    for i, (prompt, tokens) in enumerate(work):
        engine.add_request(str(i), prompt, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
    start = time.perf_counter()
    finished = {}
    with rare_collections():
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    finished[output.request_id] = time.perf_counter() - start
    return time.perf_counter() - start, finished, records


def rounds(sides: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each side by round, all sides once per round, so that a disturbance hits all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, run in sides.items():
            seconds[name].append(run())
    return seconds


def faster_threads(
    sides: Collection[str], threads: Sequence[int], run: Callable[[str, int], float]
) -> dict[str, int]:
    """The number of torch threads with which each side is the fastest in one round; `run(side, threads)`
    gives seconds.
    """
    seconds = {(side, n): run(side, n) for side in sides for n in threads}
    return {side: min(threads, key=lambda n: seconds[side, n]) for side in sides}


def ratios(seconds: dict[str, list[float]], to: str) -> dict[str, list[float]]:
    """Of each side: its time over that of the side `to` in the same round."""
    return {
        name: [a / b for a, b in zip(values, seconds[to], strict=True)] for name, values in seconds.items()
    }


def interleaved(sides: dict[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """Median seconds of each side over `rounds`."""
    return {name: statistics.median(values) for name, values in rounds(sides, repeats).items()}
