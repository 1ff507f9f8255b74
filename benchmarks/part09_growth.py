"""What does attention cost in time and memory as a text grows, with all scores at once, and in tiles?

    python -m benchmarks.part09_growth       # two minutes on a quiet machine

One layer's attention over one whole sequence, in the shape of storyteller's heads, fp32, one thread. Memory
is what the call holds at its peak beyond its inputs (benchmarks/memory.py). Then: tiles of other sizes, and
what a whole forward pass of storyteller and one request's decoding take with each kernel. In each round the
sides take turns, and the quickest of a few calls counts.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.memory import peak_bytes
from benchmarks.record import middle, quartiles, record, show, whole_numbers
from benchmarks.workloads import rounds
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


def seconds(call: Callable[[], object], least: float = 0.05) -> float:
    """The quickest of as many calls as fit into `least` seconds, one at least: others' work only adds."""
    found: list[float] = []
    while sum(found) < least:
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return min(found)


def growth(lengths: tuple[int, ...], repeats: int) -> dict[str, dict[str, list]]:
    """name -> at each length: seconds by round, and peak megabytes."""
    found = {name: {"rounds": [], "mb": []} for name in NAMES}
    for length in lengths:
        q, k, v = qkv(length)
        spans = Spans.of_one(length, length)
        calls = {name: partial(attention_kernel(name, HEAD_DIM), q, k, v, spans) for name in NAMES}
        taken = rounds({name: partial(seconds, call) for name, call in calls.items()}, repeats)
        for name, call in calls.items():
            found[name]["rounds"].append(taken[name])
            found[name]["mb"].append(peak_bytes(call) / 1e6)
    return found


def tile_sizes(length: int, repeats: int) -> dict[int, tuple[list[float], float]]:
    """By the side of a tile: seconds of each round, peak megabytes."""
    q, k, v = qkv(length)
    calls = {tile: partial(tiled_causal_attention, q, k, v, tile) for tile in TILES}
    taken = rounds({tile: partial(seconds, call) for tile, call in calls.items()}, repeats)
    return {tile: (taken[tile], peak_bytes(call) / 1e6) for tile, call in calls.items()}


def whole_model(repeats: int) -> dict[str, dict[str, list[float]]]:
    """Milliseconds by round, of a pass over a full context, and of a token that is decoded behind it."""
    model, tokenizer = load_model("storyteller"), Tokenizer.from_pretrained("storyteller")
    prompt = (tokenizer.encode("It rained. ") * 400)[:960]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)

    def prefill(name: str) -> float:
        start = time.perf_counter()
        run_prefill(model, [prompt], attention_kernel(name, HEAD_DIM))
        return (time.perf_counter() - start) * 1e3

    def decode(name: str) -> float:
        forward = CachedForward(model, kernel=attention_kernel(name, HEAD_DIM))
        return generate(forward, tokenizer, model.config, prompt, params).stats.time_per_output_token * 1e3

    return {
        what: rounds({name: partial(run, name) for name in NAMES}, repeats)
        for what, run in {"prefill": prefill, "decode": decode}.items()
    }


def main() -> None:
    arguments = whole_numbers(__doc__.splitlines()[0], longest=LENGTHS[-1], repeats=5)
    torch.set_num_threads(1)
    lengths = tuple(length for length in LENGTHS if length <= arguments.longest)

    with torch.inference_mode():
        grown = growth(lengths, arguments.repeats)
        tiles = tile_sizes(TILED_LENGTH, arguments.repeats)
    model = whole_model(arguments.repeats)

    by_length = {
        name: {
            "seconds": [statistics.median(taken) for taken in found["rounds"]],
            "rounds": [quartiles(taken) for taken in found["rounds"]],
            "mb": found["mb"],
        }
        for name, found in grown.items()
    }
    last = {name: {key: found[key][-1] for key in ("seconds", "mb")} for name, found in by_length.items()}
    over = {
        name: {key: last["eager"][key] / value for key, value in last[name].items()}
        for name in ("sdpa", "tiled")
    }
    rows = [
        [
            length,
            *(middle([s * 1e3 for s in grown[name]["rounds"][i]]) for name in NAMES),
            *(grown[name]["mb"][i] for name in NAMES),
        ]
        for i, length in enumerate(lengths)
    ]
    tables = {
        "growth": {
            "columns": ["tokens", *(f"{name}, {unit}" for unit in ("ms", "MB") for name in NAMES)],
            "rows": rows,
        },
        "tiles": {
            "columns": ["queries, and keys, in a tile", "ms", "MB"],
            "rows": [[size, middle([s * 1e3 for s in taken]), mb] for size, (taken, mb) in tiles.items()],
        },
    }
    figures = {
        "lengths": lengths,
        "longest": lengths[-1],
        "by_length": by_length,
        "at_longest": last,
        "eager_over_sdpa": over["sdpa"],
        "eager_over_tiled": over["tiled"],
        "tile_sizes": {
            "length": TILED_LENGTH,
            "tiles": TILES,
            "seconds": [statistics.median(taken) for taken, _ in tiles.values()],
            "rounds": [quartiles(taken) for taken, _ in tiles.values()],
            "mb": [mb for _, mb in tiles.values()],
        },
        "model_ms": {
            what: {name: statistics.median(ms) for name, ms in of.items()} for what, of in model.items()
        },
        "model_ms_rounds": {
            what: {name: quartiles(ms) for name, ms in of.items()} for what, of in model.items()
        },
    }
    workload = {
        "heads": HEADS, "head_dim": HEAD_DIM, "lengths": lengths, "repeats": arguments.repeats,
        "dtype": "float32",
    }  # fmt: skip
    show(record("part09_growth", __doc__.splitlines()[0], workload, figures, tables), tables)


if __name__ == "__main__":
    main()
