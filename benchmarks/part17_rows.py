"""How fast does each kernel of the chain for one quantized row read its codes, by its tile?

    python -m benchmarks.part17_rows [--only int4] [--names qkv down] [--seconds 100]

GPT-3 6.7B's widths, random weights. A graph launches a kernel over several layers' weights in turn, more than
the GPU's cache holds, as the chain does, one behind the other. What is found goes into `TILES`
(engine/kernels/quantized_row.py). Variants are compiled by several processes first.
"""

import argparse
import itertools
import os
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from torch import nn

from benchmarks.part17_gpu import SHAPES
from benchmarks.shapes import dummy_folder
from engine.kernels.quantized_row import norm_product, product_add
from engine.kernels.single_row import Operand
from engine.kernels.tiles import Tile
from engine.models.loader import load_model
from engine.quantization.quantize import pack_quantized, quantize
from engine.quantization.single_row import QuantizedSingleRow

LAYERS, REPLAYS = 12, 12
SHAPE = SHAPES["gpt3-6.7b"] | {"n_layer": LAYERS}
D, V = SHAPE["n_embd"], SHAPE["vocab_size"]
MATRICES = {"qkv": (3 * D, D), "proj": (D, D), "up": (4 * D, D), "down": (D, 4 * D), "head": (V, D)}
# Rows, warps, registers (None: as the compiler likes).
SHORT = [
    (2, 4, None),
    (4, 4, None),
    (8, 4, None),
    (4, 2, None),
    (8, 2, None),
    (8, 8, None),
    (4, 4, 96),
    (8, 4, 96),
]
LONG = [
    (1, 8, None), (2, 8, None), (4, 8, None), (8, 8, None), (2, 16, None), (4, 16, None), (8, 16, None),
    (2, 16, 64), (4, 16, 64), (4, 8, 96), (2, 4, None), (4, 4, None),
]  # fmt: skip
MORE = {"int8": [(2, 2, None)], "int4": [(16, 4, None), (16, 8, None), (8, 4, 80)]}


def candidates(method: str, name: str) -> list[tuple]:
    return LONG if name == "down" else SHORT + MORE[method]


def compile_one(method: str, name: str, rows: int, warps: int, registers: int | None) -> list[Tile]:
    """In a process of its own: the tiles to try, of which as many fit on a multiprocessor as registers
    allow, half as many, and a program for each; now compiled.
    """
    bf16, fp32, fp16 = torch.bfloat16, torch.float32, torch.float16
    int32, int64 = torch.int32, torch.int64
    many = torch.cuda.get_device_properties(0).multi_processor_count
    (N, K), group = MATRICES[name], 64 if method == "int4" and name != "head" else 0
    scales = [fp16 if group else fp32] * 2
    words = int32 if group else int64

    def kernel(resident: int | None):
        tiles = triton.cdiv(N, rows)
        programs = min(tiles, resident * many) if resident else tiles
        options = {"N": N, "K": K, "WORDS": K // 8, "GROUP": group, "ROWS": rows, "PROGRAMS": programs}
        options |= {"PDL": True, "launch_pdl": True, "num_warps": warps, "grid": (programs,)}
        options |= {"maxnreg": registers} if registers else {}
        if name in ("proj", "down"):
            interleaved = name == "down"
            return product_add.warmup(bf16, words, *scales, bf16, fp32, INTERLEAVED=interleaved, **options)
        out = fp32 if name == "head" else bf16
        return norm_product.warmup(
            fp32, words, *scales, bf16, fp32, fp32, out, 1e-5, GELU=name == "up", **options
        )

    first = kernel(2)
    first._init_handles()
    most = min(65536 // (-(-first.n_regs // 8) * 8 * 32 * warps), 64 // warps)
    if first.n_spills or not most:
        return []
    tiles = [Tile(rows, warps, resident, registers) for resident in (most, most // 2, None) if resident != 0]
    for tile in tiles:
        kernel(tile.resident)
    return tiles


def operands_of(row: QuantizedSingleRow, name: str) -> list[Operand]:
    """As the chain's kernels take them."""
    if name == "head":
        return [row.operands.head] * 2
    return [getattr(block, name) for block in row.operands.blocks]


@torch.inference_mode()
def microseconds(row: QuantizedSingleRow, name: str, tile: Tile) -> float:
    """Of a launch, as one of many in a graph."""
    row.tiles[name] = tile
    operands = operands_of(row, name)

    def run() -> None:
        for operand in operands:
            if name in ("proj", "down"):
                row.launch_linear_add(name, row.attended if name == "proj" else row.inner, operand)
            else:
                out = {"qkv": row.qkv, "up": row.inner, "head": row.logits}[name]
                row.launch_norm_linear(name, operand, out, gelu=name == "up")

    row.x.normal_(), row.attended.normal_(), row.inner.normal_()
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    graph.replay()
    for event in events[:-1]:
        event.record()
        graph.replay()
    events[-1].record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    return statistics.median(times) / len(operands) * 1e3


def usual(x: torch.Tensor) -> torch.Tensor:
    """An interleaved vector (digits.py), in the usual order."""
    return x.view(8, -1).t().reshape(-1)


def layer_of(model: nn.Module, name: str) -> nn.Module:
    """The first layer of this name."""
    block = model.blocks[0]
    layers = {"qkv": block.attention.qkv, "proj": block.attention.proj, "up": block.mlp.up}
    return (layers | {"down": block.mlp.down, "head": model.head})[name]


@torch.inference_mode()
def check(model: nn.Module, row: QuantizedSingleRow, name: str) -> float:
    """‖out - plain product‖ / ‖plain product‖, of the first layer."""
    first, layer = operands_of(row, name)[0], layer_of(model, name)
    if name in ("proj", "down"):
        a = row.attended if name == "proj" else row.inner
        row.x.zero_(), a.normal_()
        row.launch_linear_add(name, a, first)
        got, want = usual(row.x), layer.plain((a if name == "proj" else usual(a))[None].float())[0]
    else:
        block = model.blocks[0]
        norm = {"qkv": block.norm1, "up": block.norm2, "head": model.norm}[name]
        out = {"qkv": row.qkv, "up": row.inner, "head": row.logits}[name]
        row.x.normal_()
        row.launch_norm_linear(name, first, out, gelu=name == "up")
        factors = norm.weight.float(), norm.bias.float(), row.config.norm_eps
        want = layer.plain(F.layer_norm(usual(row.x), (D,), *factors)[None])[0]
        got = out.view(-1)
        if name == "up":
            got, want = usual(got), F.gelu(want, approximate="tanh")
    return float((got.float() - want).norm() / want.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=["int8", "int4"])
    parser.add_argument("--names", nargs="+", choices=MATRICES, default=list(MATRICES))
    parser.add_argument("--seconds", type=float, default=100, help="no new kernel after so long")
    options = parser.parse_args()
    began = time.perf_counter()
    jobs = [
        (method, name) for method in ("int4", "int8") for name in options.names
        if options.only in (None, method) and (method, name) != ("int4", "head")
    ]  # fmt: skip
    with ProcessPoolExecutor(max(2, os.cpu_count() - 2), mp_context=get_context("spawn")) as pool:
        compiled = {
            job: [pool.submit(compile_one, *job, *candidate) for candidate in candidates(*job)]
            for job in jobs
        }
        models: dict[str, nn.Module] = {}
        rows: dict[str, QuantizedSingleRow] = {}
        device = torch.device("cuda")
        with tempfile.TemporaryDirectory() as folder:
            dummy_folder(Path(folder), SHAPE)
            for method in dict.fromkeys(method for method, _ in jobs):
                model = load_model(
                    folder, device, "bfloat16", "dummy",
                    transform=lambda m, how=method: pack_quantized(quantize(m, how)),
                )  # fmt: skip
                models[method], rows[method] = model, QuantizedSingleRow(model, [], [])
        print(f"{time.perf_counter() - began:.0f} s: models are there", flush=True)
        for job, futures in compiled.items():
            if time.perf_counter() - began > options.seconds:
                print(*job, "left out: no time")
                continue
            method, name = job
            tiles = [tile for future in futures for tile in future.result()]
            size = sum(t.nbytes for t in layer_of(models[method], name).buffers())
            found = [(microseconds(rows[method], name, tile), tile) for tile in tiles]
            found.sort(key=lambda pair: pair[0])
            rows[method].tiles[name] = found[0][1]
            error = check(models[method], rows[method], name)
            print(f"{method} {name}: error {error:.2e}; {time.perf_counter() - began:.0f} s", flush=True)
            for took, (rows_, warps, resident, registers) in found[:8]:
                speed = size / took / 1e6
                print(f"  {took:7.2f} µs {speed:5.2f} TB/s  Tile({rows_}, {warps}, {resident}, {registers})")


if __name__ == "__main__":
    main()
