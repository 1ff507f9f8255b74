"""What does verification of 1 to 8 tokens cost on a GPU, beside a plain step?

    python -m benchmarks.part16_gpu --device cuda        # one H200; --tiny tries it on a CPU

GPT-2 XL's shape with random bf16 weights, a context of 512, 1 and 8 sequences, pages of 16 tokens, kernels
launched one after the other, as speculation does (no graphs). Random weights show no acceptance. So the last
column says what would pay: how many tokens a step must bring to be as fast as plain ones, drafts for nothing.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.record import OUT, RESULTS, record, show
from benchmarks.shapes import GPT2_XL, dummy_folder
from engine.attention.flash import sdpa_attention
from engine.batch import Batch
from engine.cache.paged import PagedCache
from engine.decoding.params import SamplingParams
from engine.decoding.sampling import SamplingState
from engine.executor import ModelForward
from engine.models.loader import load_model
from engine.scheduling.request import Request

CONTEXT, MOST, P, SEQUENCES = 512, 8, 16, (1, 8)
TINY = {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 4096, "eos_token_id": 0}


def kernels(device: str) -> dict:
    if device != "cuda":
        return {}
    from engine.kernels.paged_attention import PagedAttention
    from engine.kernels.paged_prefill import PagedPrefill

    return {"decode": PagedAttention, "prefill": PagedPrefill}


def milliseconds(forward: ModelForward, requests: list[Request], new: int, repeats: int) -> float:
    """A pass of `new` tokens of each request behind a context, and the likeliest token behind each."""
    S, device = len(requests), forward.device
    positions = tuple(range(CONTEXT, CONTEXT + new)) * S
    starts = tuple(range(0, S * new + 1, new))
    rows = tuple(range(start, start + new) for start in starts[:-1])
    batch = Batch(
        tuple(requests), tuple(7 + i for i in range(S * new)), positions, starts, (CONTEXT + new,) * S, rows
    )
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        forward(batch).argmax(-1).tolist()  # waits for the device
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[repeats // 3 :]) if device.type == "cuda" else min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a shape that a CPU can try; nothing is recorded")
    parser.add_argument("--repeats", type=int, default=60)
    options = parser.parse_args()
    shape = GPT2_XL | (TINY if options.tiny else {})
    dtype = "float32" if options.device == "cpu" else "bfloat16"
    with tempfile.TemporaryDirectory() as folder:
        model = load_model(dummy_folder(Path(folder), shape), options.device, dtype, "dummy")
    config, rows, figures = model.config, [], {}
    for S in SEQUENCES:
        blocks = S * -(-(CONTEXT + MOST) // P)
        how = {"device": options.device, "dtype": next(model.parameters()).dtype, "kernel": sdpa_attention}
        cache = PagedCache(config, blocks, P, **how, **kernels(options.device), enable_prefix_caching=False)
        requests = []
        for i in range(S):
            ids, params = [9] * (CONTEXT + MOST), SamplingParams()
            state = SamplingState(params, ids, [], i)
            requests.append(Request(str(i), str(i), ids, len(ids), params, None, state))
            cache.begin(requests[-1])
            cache.reserve(requests[-1], len(ids))
        forward = ModelForward(model, cache)
        ms = [milliseconds(forward, requests, new, options.repeats) for new in range(1, MOST + 1)]
        figures[f"s{S}"] = {"ms": ms, "over_plain": [one / ms[0] for one in ms]}
        rows += [[S, new, one, one / ms[0]] for new, one in enumerate(ms, 1)]
    table = {"columns": ["sequences", "tokens of each", "ms", "tokens per step that pay"], "rows": rows}
    workload = {"shape": shape, "context": CONTEXT, "dtype": dtype, "repeats": options.repeats}
    question = "What does verification of 1 to 8 tokens cost on a GPU, beside a plain step?"
    tables = {"verification": table}
    folder = OUT if options.tiny else RESULTS
    show(record("part16_gpu", question, workload, figures, tables, folder=folder), tables)


if __name__ == "__main__":
    main()
