"""One request on a GPU: what do codes gain beside bf16 in the same engine?

    python -m benchmarks.part17_gpu --device cuda [--shape gpt3-6.7b | gpt2-xl] [--tokens 128]

Random weights. Decode steps run as graphs over pages (Part 13), with the chain of kernels for one row. bf16
and int4 are measured a second time, by the model's own forward pass in a graph.
"""

import argparse
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from benchmarks.record import record
from benchmarks.shapes import GPT2_XL, GPT3_6_7B, dummy_folder
from engine.cache.memory import PageMemory
from engine.core.ahead import AheadEngine
from engine.decoding.params import SamplingParams
from engine.execution import quantized_steps
from engine.execution.graphs import DecodeGraphs, GraphWay, ModelStep
from engine.execution.last_tokens import LastTokens
from engine.execution.runner import EagerWay, ModelRunner
from engine.kernels.paged_attention import PagedAttention
from engine.kernels.paged_prefill import PagedPrefill
from engine.kernels.prompt_rows import gpt2_prompt_forward
from engine.models.loader import load_model
from engine.quantization.quantize import model_bytes, pack_quantized, quantize
from engine.scheduling.continuous import ContinuousScheduler
from engine.text.tokenizer import Tokenizer
from engine.wiring.attention_kernel import attention_kernel

SHAPES = {"gpt2-xl": GPT2_XL, "gpt3-6.7b": GPT3_6_7B}
PROMPT, LONGEST = 128, 512
SIDES = {
    "bf16": None, "int8": "int8", "int4": "int4", "bf16, plain forward": None, "int4, plain forward": "int4",
}  # fmt: skip


def plain_forward(model, memory, max_rows):
    step = ModelStep(model, list(memory.keys), list(memory.values))
    return lambda rows: step


def seconds_per_token(folder: Path, side: str, device: torch.device, tokens: int) -> tuple[float, int]:
    """Median of three runs, of a request's time behind its first token; and bytes of weights."""
    method = SIDES[side]
    transform = None if method is None else lambda m: pack_quantized(quantize(m, method))
    model = load_model(folder, device, "bfloat16", "dummy", transform=transform)
    kernel = attention_kernel("triton", model.config.head_dim, device, torch.bfloat16)
    memory = PageMemory(
        model.config, 2 * LONGEST // 16, 16, device, torch.bfloat16, kernel,
        decode=PagedAttention, prefill=PagedPrefill,
    )  # fmt: skip
    last = LastTokens(1, device)
    steps = plain_forward if "plain" in side else quantized_steps.fastest_steps
    V, width = model.config.vocab_size, LONGEST // 16
    graphs = DecodeGraphs(steps(model, memory, 1), last, V, 1, width, device.type == "cuda")
    runner = ModelRunner(
        [GraphWay(graphs, V), EagerWay(model, memory, gpt2_prompt_forward(model), last.upload)],
        memory,
        last_tokens=last,
    )
    tokenizer, scheduler = Tokenizer.from_pretrained(folder), ContinuousScheduler(memory.plan(), 1, LONGEST)
    engine = AheadEngine(tokenizer, model.config, scheduler, runner, max_model_len=LONGEST)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    runs = []
    for run in range(4):
        engine.add_request(str(run), list(range(5, 5 + PROMPT)), params)
        first = None
        while engine.has_unfinished_requests():
            if engine.step() and first is None:
                first = time.perf_counter()
        runs.append((time.perf_counter() - first) / (tokens - 1))
    return statistics.median(runs[1:]), model_bytes(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="gpt3-6.7b", choices=SHAPES)
    parser.add_argument("--layers", type=int, help="fewer, to try it")
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    shape = SHAPES[options.shape] | ({"n_layer": options.layers} if options.layers else {})
    measured = {}
    with tempfile.TemporaryDirectory() as name:
        measure = partial(seconds_per_token, dummy_folder(Path(name), shape))
        for side in SIDES:
            measured[side] = measure(side, torch.device(options.device), options.tokens)
            print(
                side,
                f"{measured[side][0] * 1e3:.3f} ms a token, {measured[side][1] / 1e9:.2f} GB",
                flush=True,
            )
    base = measured["bf16"][0]
    rows = [[side, bytes_ / 1e9, s * 1e3, base / s] for side, (s, bytes_) in measured.items()]
    record(
        f"part17_gpu_{options.shape.replace('-', '_').replace('.', '_')}",
        "One request on a GPU: what do codes gain beside bf16 in the same engine?",
        {"shape": options.shape, "layers": shape["n_layer"], "prompt_tokens": PROMPT,
         "new_tokens": options.tokens, "batch": 1},
        {side: {"ms": s * 1e3, "bytes": size, "over_bf16": base / s} for side, (s, size) in measured.items()},
        {"race": {"columns": ["weights", "GB", "ms a token", "× bf16"], "rows": rows}},
    )  # fmt: skip


if __name__ == "__main__":
    main()
