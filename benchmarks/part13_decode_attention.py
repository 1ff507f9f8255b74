"""How close does decode attention over pages come to the speed of memory, and what does split-K gain?

    python -m benchmarks.part13_decode_attention [--out FOLDER]       # half a minute on one H200

bf16, pages of 16 tokens in random order. Each measurement replays a CUDA graph, with the GPU's cache flushed
in between, and takes the median. The yardstick is a device-to-device copy in the same run, bytes read plus
bytes written.
"""

import argparse
from functools import partial
from pathlib import Path

import torch
from triton.testing import do_bench

from benchmarks.record import RESULTS, record
from engine.attention.paged import Gathered, Pages
from engine.kernels.paged_attention import num_splits, paged_attention

P = 16
HEADS = {"gpt2_xl": (25, 25, 64), "grouped": (16, 8, 128)}  # query heads, key heads, width
WORK = {"256x1024": (256, 1024), "64x512": (64, 512), "1x512": (1, 512), "1x8192": (1, 8192)}


def copy_bandwidth() -> float:
    """Bytes per second."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / do_bench(lambda: target.copy_(source), return_mode="median") * 1e3


def milliseconds(run) -> float:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return do_bench(graph.replay, warmup=50, rep=200, return_mode="median")


def measure(S: int, N: int, Hq: int, Hkv: int, Dh: int) -> dict[str, float]:
    B = S * N // P
    keys, values = torch.randn(2, B, P, Hkv, Dh, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(S, Hq, Dh, device="cuda", dtype=torch.bfloat16)
    order = torch.randperm(B).view(S, -1).numpy()
    pages = Pages.of(list(order), [N] * S, P)
    own = num_splits(S, Hkv, q.device)
    run = partial(paged_attention, q, keys, values, *pages.on(q.device))
    if S * N <= 2**16:  # gathering copies everything twice over
        want = Gathered(pages, Hq, keys)(q, keys, values).float()
        error = (run(own).float() - want).norm() / want.norm()
        assert error < 1e-2, f"relative error {error:.1e}"
    return {
        "splits": own,
        "bytes": 2 * keys.nbytes,
        "ms": milliseconds(partial(run, own)),
        "ms_unsplit": milliseconds(partial(run, 1)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    figures, rows = {"copy_terabytes_per_second": bandwidth / 1e12}, []
    for name, heads in HEADS.items():
        for work, (S, N) in WORK.items():
            found = measure(S, N, *heads)
            found["of_copy"] = found["bytes"] / bandwidth / found["ms"] * 1e3
            found["split_gains"] = found["ms_unsplit"] / found["ms"]
            figures.setdefault(name, {})[f"s{work}"] = found
            Hq, Hkv, Dh = heads
            rows.append(
                [f"{Hq} / {Hkv} / {Dh}", S, N, found["splits"], 1e3 * found["ms"], 1e3 * found["ms_unsplit"],
                 found["split_gains"], found["of_copy"]]
            )  # fmt: skip
            print(*rows[-1], flush=True)
    columns = ["query heads / key heads / width", "sequences", "tokens in each", "splits", "µs",
               "µs without splits", "splits gain", "of copy bandwidth"]  # fmt: skip
    record(
        "part13_decode_attention",
        __doc__.splitlines()[0],
        {"dtype": "bfloat16", "tokens_per_page": P, "timing": "graph replay, median"},
        figures,
        {"attention": {"columns": columns, "rows": rows}},
        options.out,
    )


if __name__ == "__main__":
    main()
