"""What does attention cost in time and memory as a text grows, with all scores at once, and in tiles?

    python -m benchmarks.part09_growth       # two minutes on a quiet machine

One layer's attention over one whole sequence, in the shape of storyteller's heads, fp32, one thread. Memory
is what the call holds at its peak beyond its inputs (benchmarks/memory.py; the system's own count beside
it). Then: tiles of other sizes, and what a whole forward pass of storyteller and one request's decoding
take with each kernel.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from rich import print
from rich.table import Table
from torch import Tensor

from benchmarks.memory import peak_bytes, peak_resident_bytes
from benchmarks.record import record
from benchmarks.workloads import interleaved
from engine.attention.interface import Spans
from engine.attention.tiled import tiled_causal_attention
from engine.cache.single import CachedForward
from engine.decoding.greedy import generate
from engine.decoding.params import SamplingParams
from engine.layers.prefill import run_prefill
from engine.models.loader import load_model
from engine.text.tokenizer import Tokenizer
from engine.wiring.attention_kernel import attention_kernel

NAMES = ("eager", "tiled", "sdpa")
HEADS, HEAD_DIM = 4, 64
LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
TILED_LENGTH = 2048
TILES = (32, 64, 128, 256, 512)


def qkv(length: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    return tuple(torch.randn(length, HEADS, HEAD_DIM, generator=generator) for _ in range(3))


def seconds(call: Callable[[], object], least: float = 0.5) -> float:
    """The quickest of as many calls as fit into `least` seconds, three at least: others' work only adds."""
    found: list[float] = []
    while len(found) < 3 or sum(found) < least:
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return min(found)


def growth(lengths: tuple[int, ...]) -> dict[str, dict[str, list[float]]]:
    """name -> seconds, peak megabytes by PyTorch's record, and by the system's, at each length."""
    found = {name: {"seconds": [], "mb": [], "resident_mb": []} for name in NAMES}
    for length in lengths:
        q, k, v = qkv(length)
        spans = Spans.of_one(length, length)
        for name in NAMES:
            call = partial(attention_kernel(name, HEAD_DIM), q, k, v, spans)
            found[name]["seconds"].append(seconds(call))
            found[name]["mb"].append(peak_bytes(call) / 1e6)
            found[name]["resident_mb"].append(peak_resident_bytes(call) / 1e6)
    return found


def tile_sizes(length: int) -> dict[str, list[float]]:
    q, k, v = qkv(length)
    calls = [lambda tile=tile: tiled_causal_attention(q, k, v, tile) for tile in TILES]
    return {
        "length": length,
        "tiles": list(TILES),
        "seconds": [seconds(call) for call in calls],
        "mb": [peak_bytes(call) / 1e6 for call in calls],
    }


def whole_model(repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds of a forward pass over a full context, and of a token that is decoded behind it."""
    model, tokenizer = load_model("storyteller"), Tokenizer.from_pretrained("storyteller")
    prompt = (tokenizer.encode("It rained. ") * 400)[:960]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)

    def prefill(name: str) -> float:
        start = time.perf_counter()
        run_prefill(model, [prompt], attention_kernel(name, HEAD_DIM))
        return time.perf_counter() - start

    def decode(name: str) -> float:
        forward = CachedForward(model, kernel=attention_kernel(name, HEAD_DIM))
        return generate(forward, tokenizer, model.config, prompt, params).stats.time_per_output_token

    found = {}
    for what, run in {"prefill": prefill, "decode": decode}.items():
        sides = {name: (lambda name=name, run=run: run(name)) for name in NAMES}
        found[what] = {name: value * 1e3 for name, value in interleaved(sides, repeats).items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--longest", type=int, default=LENGTHS[-1])
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lengths = tuple(length for length in LENGTHS if length <= arguments.longest)

    with torch.inference_mode():
        by_length = growth(lengths)
        tiles = tile_sizes(TILED_LENGTH)
    model = whole_model(arguments.repeats)

    table = Table("tokens", *(f"{name}, {unit}" for unit in ("ms", "MB") for name in NAMES))
    rows = [
        [
            length,
            *(
                by_length[name][key][i] * scale
                for key, scale in (("seconds", 1e3), ("mb", 1))
                for name in NAMES
            ),
        ]
        for i, length in enumerate(lengths)
    ]
    for row in rows:
        table.add_row(*(f"{cell:,.3g}" if isinstance(cell, float) else f"{cell:,}" for cell in row))
    print(table, tiles, model)
    columns = ["tokens", *(f"{name}, {unit}" for unit in ("ms", "MB") for name in NAMES)]
    last = {name: {key: values[-1] for key, values in found.items()} for name, found in by_length.items()}
    record(
        "part09_growth",
        __doc__.splitlines()[0],
        {
            "heads": HEADS,
            "head_dim": HEAD_DIM,
            "lengths": lengths,
            "repeats": arguments.repeats,
            "dtype": "float32",
        },
        {
            "lengths": lengths,
            "longest": lengths[-1],
            "by_length": by_length,
            "at_longest": last,
            "eager_over_sdpa": {
                key: last["eager"][key] / last["sdpa"][key] for key in ("seconds", "mb", "resident_mb")
            },
            "eager_over_tiled": {
                key: last["eager"][key] / last["tiled"][key] for key in ("seconds", "mb", "resident_mb")
            },
            "tile_sizes": tiles,
            "model_ms": model,
        },
        {
            "growth": {"columns": columns, "rows": rows},
            "tiles": {
                "columns": ["queries, and keys, in a tile", "ms", "MB"],
                "rows": [
                    [size, s * 1e3, mb]
                    for size, s, mb in zip(TILES, tiles["seconds"], tiles["mb"], strict=True)
                ],
            },
        },
    )


if __name__ == "__main__":
    main()
