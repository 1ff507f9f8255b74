"""How fast is the engine on a GPU, as it is used? GPT-2 XL's shape with random bf16 weights, on one H200.

    python -m benchmarks.engine_on_a_gpu [--only step one many prefill peers] [--out FOLDER]

step: a whole decode step at a context of 512, as `LLM` runs it (host, logits, sampling), as a share of the
floor: the time in which a copy moves as many bytes as there are weights, keys and values to read. one: a
request of 482 tokens in and 256 out. many: 256 requests of 50 to 512 tokens in and out. prefill: 8 prompts of
1,024 tokens in one pass, beside the matrix products in it alone. peers: Hugging Face's steps at the same
context, by `generate` as it comes, and its model's forward pass over a static cache in a CUDA graph, as it is
and compiled.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from triton.testing import do_bench

from benchmarks.part13_decode_attention import copy_bandwidth
from benchmarks.part13_steps import CONTEXT, WINDOW, step_milliseconds
from benchmarks.part20_qwen3 import greedy, timed
from benchmarks.record import RESULTS, record
from benchmarks.shapes import GPT2_XL, dummy_folder
from engine.execution.runner import EagerWay, ModelRunner
from engine.wiring.llm import LLM

BATCHES = (1, 64, 256)
SEED = 0
PARTS = ("step", "one", "many", "prefill", "peers")


def random_prompt(rng: random.Random, length: int) -> dict:
    return {"prompt_token_ids": [rng.randrange(GPT2_XL["vocab_size"]) for _ in range(length)]}


def model_of(llm: LLM) -> Any:
    runner = llm.engine.executor
    assert isinstance(runner, ModelRunner)
    way = runner.ways[-1]
    assert isinstance(way, EagerWay)
    return way.model


def steps(llm: LLM, bandwidth: float) -> tuple[dict, list[list]]:
    config, figures, rows = llm.config, {}, []
    model = model_of(llm)
    # of the positions' embeddings a row is read; the tokens' are the output layer's weights, too
    weights = sum(p.nbytes for p in model.parameters()) - model.embed_position.weight.nbytes
    for batch in BATCHES:
        # The first four are left out: the GPU's clock rises for half a second.
        found = [step_milliseconds(llm.engine, batch) for _ in range(9)][4:]
        moved = weights + batch * CONTEXT * config.kv_bytes_per_token(2)
        floor = moved / bandwidth * 1e3
        ms = statistics.median(found)
        figures[f"b{batch}"] = {
            "ms": ms,
            "all_ms": found,
            "floor_ms": floor,
            "of_floor": floor / ms,
        }
        rows.append([batch, floor, ms, floor / ms, batch / ms * 1e3])
        print("step", *rows[-1], flush=True)
    return figures, rows


def one(llm: LLM) -> dict:
    rng = random.Random(SEED)
    found = [256 / timed(llm, [random_prompt(rng, 482)], [256]) for _ in range(4)][1:]
    return {"tokens_per_second": statistics.median(found), "all": found}


def mixed() -> tuple[list[dict], list[int]]:
    rng = random.Random(SEED)
    prompts = [random_prompt(rng, rng.randint(50, 512)) for _ in range(256)]
    return prompts, [rng.randint(50, 512) for _ in prompts]


def many(llm: LLM) -> dict:
    rng, (prompts, lengths) = random.Random(SEED + 1), mixed()
    found = []
    for _ in range(4):
        prompts = [random_prompt(rng, len(p["prompt_token_ids"])) for p in prompts]  # no prefix is known
        found.append(sum(lengths) / timed(llm, prompts, lengths))
    found = found[1:]
    return {"tokens_per_second": statistics.median(found), "all": found, "tokens": sum(lengths)}


@torch.inference_mode()
def prefill(llm: LLM) -> dict:
    model, rng = model_of(llm), random.Random(SEED)
    config, T = llm.config, 8 * 1024
    seconds = []
    for round in range(6):
        for i in range(8):
            prompt = random_prompt(rng, 1023)["prompt_token_ids"]
            llm.engine.add_request(f"{round}/{i}", prompt, greedy(1))
        torch.cuda.synchronize()
        start = time.perf_counter()
        while llm.engine.has_unfinished_requests():
            llm.engine.step()
        seconds.append(time.perf_counter() - start)
    ours = statistics.median(seconds[1:]) * 1e3
    products = 0.0
    for linear in (layer for layer in model.blocks[0].modules() if isinstance(layer, torch.nn.Linear)):
        x = torch.randn(T, linear.in_features, device="cuda", dtype=torch.bfloat16)
        product = partial(torch.mm, x, linear.weight.t())
        products += config.num_layers * do_bench(product, return_mode="median")
    seconds = [value * 1e3 for value in seconds[1:]]
    return {"ms": ours, "all_ms": seconds, "products_ms": products, "of_products": products / ours}


def peers() -> dict:
    """Milliseconds of a step of Hugging Face's model."""
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("cuda"):
        model = GPT2LMHeadModel(GPT2Config.from_dict(GPT2_XL)).to(torch.bfloat16).eval()
    found = {}
    for batch in BATCHES:
        ids = torch.randint(0, GPT2_XL["vocab_size"], (batch, CONTEXT - WINDOW), device="cuda")
        times = {}
        for new in (1, 2 * WINDOW + 1, 1, 2 * WINDOW + 1):  # the first two warm up
            start = time.perf_counter()
            model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)
            torch.cuda.synchronize()
            times[new] = time.perf_counter() - start
        found[f"b{batch}"] = {
            "ms": (times[2 * WINDOW + 1] - times[1]) / (2 * WINDOW) * 1e3,
            "graph_ms": static_step(model, batch, compiled=False),
            "compiled_ms": static_step(model, batch, compiled=True),
        }
        print("peers", batch, found[f"b{batch}"], flush=True)
    return found


@torch.no_grad()
def static_step(model: torch.nn.Module, batch: int, compiled: bool) -> float:
    """Milliseconds of a forward pass over keys and values at fixed addresses, all of them seen, and of the
    choice of the likeliest tokens, in a CUDA graph.
    """
    from transformers import StaticCache

    torch._dynamo.reset()
    cache = StaticCache(config=model.config, max_cache_len=CONTEXT)
    ids, positions = torch.zeros(2, batch, 1, dtype=torch.long, device="cuda")
    seen = torch.zeros(batch, 1, 1, CONTEXT, dtype=torch.bfloat16, device="cuda")
    given = {"past_key_values": cache, "attention_mask": seen, "position_ids": positions}
    forward = torch.compile(model.forward, fullgraph=True) if compiled else model.forward

    def step() -> torch.Tensor:
        return forward(ids, **given).logits[:, -1].argmax(-1)

    model(ids, **given)  # gives the cache its memory
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step(), step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        step()
    times = []
    for _ in range(20):  # each stores a token more, and there is room for CONTEXT
        start = time.perf_counter()
        for _ in range(10):
            graph.replay()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / 10)
    return statistics.median(times[5:]) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    bandwidth = copy_bandwidth()
    torch.cuda.empty_cache()
    figures, tables = {"copy_terabytes_per_second": bandwidth / 1e12}, {}
    folder = dummy_folder(Path(tempfile.mkdtemp()), GPT2_XL)
    start = time.perf_counter()
    llm = LLM(folder, load_format="dummy", kv_cache="paged")
    figures["load_seconds"] = time.perf_counter() - start
    print("loaded", figures["load_seconds"], flush=True)
    if "step" in options.only:
        figures["step"], rows = steps(llm, bandwidth)
        columns = ["sequences", "floor, ms", "step, ms", "of the floor", "tokens/s"]
        tables["step"] = {"columns": columns, "rows": rows}
    for name, measure in (("one", one), ("many", many), ("prefill", prefill)):
        if name in options.only:
            figures[name] = measure(llm)
            print(name, json.dumps(figures[name]), flush=True)
    if "peers" in options.only:
        figures["peers"] = peers()
        print("peers", json.dumps(figures["peers"]), flush=True)
    record(
        "part13_engine",
        "How fast is the engine on a GPU, as it is used?",
        {"model": "GPT-2 XL's shape, random bf16 weights", "context": CONTEXT, "seed": SEED},
        figures,
        tables,
        folder=options.out,
    )


if __name__ == "__main__":
    main()
