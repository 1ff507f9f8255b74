"""What does each kernel wait for at 8,192 tokens on an H200: bytes, calls or arithmetic?

    python -m benchmarks.part09_reckoned      # measures nothing: reckons from part09_prefill_gpu

One layer of 16 heads of 64 numbers in bf16. `eager`: the bytes of its passes over the scores, by the
bandwidth of a copy (part13_decode_attention). `tiled`: its calls, counted without numbers (PyTorch's device
"meta"). `triton`: its multiplications and additions. And Part 9's race in TFLOP/s.
"""

import torch
from rich import print
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.record import derive, read_record
from engine.attention.tiled import TILE, tiled_causal_attention

SOURCE = "part09_prefill_gpu"
LENGTH, HEADS, HEAD_DIM, NUMBER_BYTES = 8192, 16, 64, 2
PEAK_TFLOPS = 989  # bf16, dense: NVIDIA's data sheet of the H200
PASSES = ("q·kᵀ writes", "the mask reads", "and writes", "softmax reads", "and writes", "weights·v reads")
KERNEL_TILE = 64  # queries of a program of our Triton kernels in 16 bits
RACE = ("tuned", "plain", "varlen", "cudnn")
NAMES = ("ours", "plain", "`varlen_attn`", "cuDNN")


class Calls(TorchDispatchMode):
    """Counts operations that compute: neither views nor empty tensors, which are no call of a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation, types, arguments=(), named=None):
        self.count += not (operation.is_view or operation.name().startswith("aten::empty"))
        return operation(*arguments, **(named or {}))


def calls_of_tiled() -> int:
    """How many operations `tiled_causal_attention` makes."""
    q, k, v = (torch.empty(LENGTH, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="meta") for _ in range(3))
    with Calls() as calls:
        tiled_causal_attention(q, k, v)
    return calls.count


def main() -> None:
    recorded = read_record(SOURCE)["figures"]
    growth = recorded["growth"]
    at = growth["lengths"].index(LENGTH)
    ms = {name: growth[name]["ms"][at] for name in ("eager", "tiled", "sdpa", "triton")}
    terabytes = read_record("part13_decode_attention")["figures"]["copy_terabytes_per_second"]

    scores_gb = HEADS * LENGTH**2 * NUMBER_BYTES / 1e9
    eager_gb = len(PASSES) * scores_gb
    calls, tiles = calls_of_tiled(), (LENGTH // TILE) * (LENGTH // TILE + 1) // 2
    gflop = 4 * HEADS * HEAD_DIM * LENGTH * (LENGTH + 1) / 2 / 1e9
    tflops = gflop / ms["triton"]
    programs = LENGTH // KERNEL_TILE
    key_tile_bytes = 2 * KERNEL_TILE * HEAD_DIM * NUMBER_BYTES  # a tile of keys, and of values
    figures = {
        "ms": ms,
        "scores_gb": scores_gb,
        "passes": list(PASSES),
        "eager_gb": eager_gb,
        "eager_least_ms": eager_gb / terabytes,
        "copy_terabytes_per_second": terabytes,
        "tiles": tiles,
        "tiles_of_the_square": (LENGTH // TILE) ** 2,
        "calls": calls,
        "calls_per_tile": calls / tiles,
        "us_per_call": ms["tiled"] / calls * 1e3,
        "tiled_over_eager": ms["tiled"] / ms["eager"],
        "gflop": gflop,
        "triton_tflops": tflops,
        "triton_share_of_peak": tflops / PEAK_TFLOPS,
        "triton_least_ms": gflop / PEAK_TFLOPS,
        "triton_key_gb": HEADS * programs * (programs + 1) / 2 * key_tile_bytes / 1e9,
        "keys_and_values_mb": 2 * HEADS * LENGTH * HEAD_DIM * NUMBER_BYTES / 1e6,
        "queries_and_results_mb": 2 * HEADS * LENGTH * HEAD_DIM * NUMBER_BYTES / 1e6,
    }
    regimes = [
        [
            "eager",
            ms["eager"],
            "bytes",
            f"{eager_gb:.1f} GB of scores: {figures['eager_least_ms']:.1f} ms at least",
        ],
        ["tiled", ms["tiled"], "calls", f"{calls:,} calls: {figures['us_per_call']:.1f} µs each"],
        [
            "triton",
            ms["triton"],
            "arithmetic",
            f"{gflop:.0f} GFLOP: {figures['triton_least_ms']:.2f} ms at least",
        ],
    ]
    labels = {  # as in part09_prefill_gpu
        "dh64": "64", "dh128_grouped": "128, grouped", "dh128": "128",
        "8x1024": "8×1,024", "1x8192": "1×8,192", "mixed": "mixed",
    }  # fmt: skip
    race = []
    for name, found in recorded["race"].items():
        if isinstance(found, dict):
            shape, _, work = name.rpartition("_")
            speeds = [found["tflops"].get(side) for side in RACE]
            race.append([labels[shape], labels[work], found["us"]["tuned"], *speeds])
    tables = {
        "regimes": {"columns": ["kernel", "ms", "waits for", "reckoned"], "rows": regimes},
        "race": {
            "columns": ["heads", "sequences", "ours, µs", *(f"{name}, TFLOP/s" for name in NAMES)],
            "rows": race,
        },
    }
    print(figures, regimes, race)
    print(derive("part09_reckoned", SOURCE, __doc__.splitlines()[0], figures, tables))


if __name__ == "__main__":
    main()
