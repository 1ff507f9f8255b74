"""What does each step of writing the decode kernel gain, and what does each step of launching it?

    python -m benchmarks.part13_steps [--only attention store launches] [--out FOLDER]    # about a minute

attention: one new token of each sequence over pages of 16 in random order, bf16, GPT-2 XL's heads and grouped
ones; each kernel replayed in a CUDA graph with the GPU's cache flushed, median. store: new keys and values
into their pages. launches: whole decode steps of GPT-2 XL's shape through the engine at a context of 512,
with kernels launched one by one, in a graph, in a graph of tuned kernels, and one step ahead, in turns.

The kernels of the first steps are here, and nowhere in the engine: article and notebook begin with them.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.record import RESULTS, record
from benchmarks.shapes import GPT2_XL, dummy_folder
from benchmarks.workloads import rounds
from engine.attention.paged import Gathered, Pages
from engine.kernels.paged_attention import num_splits, paged_attention

P = 16
HEADS = {"gpt2_xl": (25, 25, 64), "grouped": (16, 8, 128)}  # query heads, key heads, width
WORK = {"64x512": (64, 512), "256x1024": (256, 1024), "1x8192": (1, 8192)}
TILES = (1, 4, 16, 32, 64, 128, 256)
STEPS = {
    "gather": "gather, then PyTorch",
    "two_passes": "a token at a time, two passes",
    "one_pass": "a running softmax: one pass",
    "tiles": "64 tokens at a time",
    "packed": "query heads share a key head: `tl.dot`",
    "split": "several programs for a sequence",
}
CONTEXT = 512
WINDOW = 16  # steps on either side of it
BATCHES = (1, 64, 256)
ROUNDS = 5
LAUNCHES = {
    "eager": "one launch after the other",
    "graph": "the same kernels in a graph",
    "tuned": "a graph of tuned kernels",
    "ahead": "and one step ahead",
}


# The first kernels. A program takes one query head of one sequence.


def by_query_head(kernel, q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lens: Tensor, **options):
    """q[S, Hq, Dh], keys and values[B, P, Hkv, Dh], tables[S, W], lens[S] -> [S, Hq, Dh]."""
    (S, Hq, Dh), (_, P, Hkv, _) = q.shape, keys.shape
    out = torch.empty(S, Hq, Dh, dtype=q.dtype, device=q.device)
    kernel[(Hq, S)](
        q, keys, values, tables, lens, out, tables.stride(0), Dh**-0.5,
        HQ=Hq, HKV=Hkv, DH=Dh, WIDE=triton.next_power_of_2(Dh), P=P, **options,
    )  # fmt: skip
    return out


def two_passes(q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lens: Tensor) -> Tensor:
    """The largest score first, then everything else: each key is read twice."""
    return by_query_head(_two_passes, q, keys, values, tables, lens, num_warps=1)


def one_pass(q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lens: Tensor) -> Tensor:
    """With a running softmax, each key is read once."""
    return by_query_head(_one_pass, q, keys, values, tables, lens, num_warps=1)


def tiles(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lens: Tensor,
    tokens: int = 64,
    num_warps: int = 4,
) -> Tensor:
    """`tokens` keys at a time."""
    return by_query_head(_tiles, q, keys, values, tables, lens, TOKENS=tokens, num_warps=num_warps)


@triton.jit
def _key_row(tables, sequence, token, width, head, P: tl.constexpr, HKV: tl.constexpr):
    """Which row of keys[-1, DH] holds this token's key: one number, or a tile of them."""
    block = tl.load(tables + sequence * width + token // P).to(tl.int64)
    return (block * P + token % P) * HKV + head


@triton.jit
def _two_passes(
    q, keys, values, tables, lens, out, width, scale,
    HQ: tl.constexpr, HKV: tl.constexpr, DH: tl.constexpr, WIDE: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    head, sequence = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, WIDE)
    place = (sequence * HQ + head) * DH + d  # [WIDE]: of this head's query in q, and of its result in out
    query = tl.load(q + place, mask=d < DH, other=0.0).to(tl.float32) * scale  # [WIDE]
    length = tl.load(lens + sequence)
    maximum = tl.full([], -float("inf"), tl.float32)
    for token in range(0, length):
        row = _key_row(tables, sequence, token, width, head // (HQ // HKV), P, HKV)
        k = tl.load(keys + row * DH + d, mask=d < DH, other=0.0).to(tl.float32)
        maximum = tl.maximum(maximum, tl.sum(query * k, 0))
    total = tl.full([], 0.0, tl.float32)
    weighted = tl.zeros([WIDE], tl.float32)
    for token in range(0, length):
        row = _key_row(tables, sequence, token, width, head // (HQ // HKV), P, HKV)
        k = tl.load(keys + row * DH + d, mask=d < DH, other=0.0).to(tl.float32)
        v = tl.load(values + row * DH + d, mask=d < DH, other=0.0).to(tl.float32)
        weight = tl.exp(tl.sum(query * k, 0) - maximum)
        total += weight
        weighted += weight * v
    tl.store(out + place, (weighted / total).to(out.dtype.element_ty), mask=d < DH)


@triton.jit
def _one_pass(
    q, keys, values, tables, lens, out, width, scale,
    HQ: tl.constexpr, HKV: tl.constexpr, DH: tl.constexpr, WIDE: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    head, sequence = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, WIDE)  # [WIDE]: the numbers of a head, a power of two
    place = (sequence * HQ + head) * DH + d  # [WIDE]: of this head's query in q, and of its result in out
    query = tl.load(q + place, mask=d < DH, other=0.0).to(tl.float32) * scale  # [WIDE]
    length = tl.load(lens + sequence)
    maximum = tl.full([], -float("inf"), tl.float32)  # the three that a running softmax carries
    total = tl.full([], 0.0, tl.float32)
    weighted = tl.zeros([WIDE], tl.float32)
    for token in range(0, length):
        row = _key_row(tables, sequence, token, width, head // (HQ // HKV), P, HKV)
        k = tl.load(keys + row * DH + d, mask=d < DH, other=0.0).to(tl.float32)  # [WIDE]
        v = tl.load(values + row * DH + d, mask=d < DH, other=0.0).to(tl.float32)  # [WIDE]
        score = tl.sum(query * k, 0)  # one number
        new = tl.maximum(maximum, score)
        shrink, weight = tl.exp(maximum - new), tl.exp(score - new)
        total = total * shrink + weight
        weighted = weighted * shrink + weight * v
        maximum = new
    tl.store(out + place, (weighted / total).to(out.dtype.element_ty), mask=d < DH)


@triton.jit
def _tiles(
    q, keys, values, tables, lens, out, width, scale,
    HQ: tl.constexpr, HKV: tl.constexpr, DH: tl.constexpr, WIDE: tl.constexpr, P: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    head, sequence = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, WIDE)
    place = (sequence * HQ + head) * DH + d  # [WIDE]: of this head's query in q, and of its result in out
    query = tl.load(q + place, mask=d < DH, other=0.0).to(tl.float32) * scale  # [WIDE]
    length = tl.load(lens + sequence)
    maximum = tl.full([], -float("inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    weighted = tl.zeros([WIDE], tl.float32)
    for start in range(0, length, TOKENS):
        token = start + tl.arange(0, TOKENS)  # [TOKENS]
        valid = token < length
        # beyond the end: the last token's address, so that nobody else's block is looked up
        row = _key_row(tables, sequence, tl.minimum(token, length - 1), width, head // (HQ // HKV), P, HKV)
        address = row[:, None] * DH + d[None, :]  # [TOKENS, WIDE]
        inside = valid[:, None] & (d < DH)[None, :]
        k = tl.load(keys + address, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(values + address, mask=inside, other=0.0).to(tl.float32)
        scores = tl.where(valid, tl.sum(query[None, :] * k, 1), -float("inf"))  # [TOKENS]
        new = tl.maximum(maximum, tl.max(scores, 0))
        shrink, weights = tl.exp(maximum - new), tl.exp(scores - new)
        total = total * shrink + tl.sum(weights, 0)
        weighted = weighted * shrink + tl.sum(weights[:, None] * v, 0)
        maximum = new
    tl.store(out + place, (weighted / total).to(out.dtype.element_ty), mask=d < DH)


# Measuring attention


def milliseconds(run: Callable[[], object]) -> float:
    """A graph's replay."""
    from triton.testing import do_bench

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return do_bench(graph.replay, warmup=25, rep=100, return_mode="median")


def scattered(S: int, N: int, Hkv: int, Dh: int) -> tuple[Pages, Tensor, Tensor]:
    """S sequences of N tokens each, their blocks in random order: pages, keys and values."""
    keys, values = torch.randn(2, S * N // P, P, Hkv, Dh, device="cuda", dtype=torch.bfloat16)
    order = torch.randperm(len(keys)).view(S, -1).numpy()
    return Pages.of(list(order), [N] * S, P), keys, values


def attention(heads: Iterable[str] = HEADS, work: Iterable[str] = WORK) -> tuple[dict, dict]:
    figures, tables = {}, {}
    for name in heads:
        Hq, Hkv, Dh = HEADS[name]
        found = {step: {} for step in STEPS}
        by_tile: dict[str, list[float]] = {}
        by_tile_one_warp: dict[str, list[float]] = {}
        for label in work:
            S, N = WORK[label]
            pages, keys, values = scattered(S, N, Hkv, Dh)
            q = torch.randn(S, Hq, Dh, device="cuda", dtype=torch.bfloat16)
            given = q, keys, values, *pages.on(q.device)
            kernels = {
                "gather": partial(Gathered(pages, Hq, keys), q, keys, values),
                "two_passes": partial(two_passes, *given),
                "one_pass": partial(one_pass, *given),
                "tiles": partial(tiles, *given),
                "packed": partial(paged_attention, *given, 1),
                "split": partial(paged_attention, *given, num_splits(S, Hkv, q.device)),
            }
            want = kernels["one_pass"]().float()
            for step, run in kernels.items():
                error = (run().float() - want).norm() / want.norm()
                assert error < 1e-2, f"{step}: relative error {error:.1e}"
                found[step][f"s{label}"] = 1e3 * milliseconds(run)
            by_tile[f"s{label}"] = [1e3 * milliseconds(partial(tiles, *given, size)) for size in TILES]
            by_tile_one_warp[f"s{label}"] = [
                1e3 * milliseconds(partial(tiles, *given, size, num_warps=1)) for size in TILES
            ]
            print(name, label, {step: round(us[f"s{label}"], 1) for step, us in found.items()})
            print("tiles", TILES, [round(us, 1) for us in by_tile[f"s{label}"]], flush=True)
        figures[name] = {
            "us": found, "tiles": TILES, "tile_us": by_tile, "tile_us_one_warp": by_tile_one_warp,
        }  # fmt: skip
        columns = ["step, µs", *(f"{S} × {N:,}" for S, N in map(WORK.get, work))]
        rows = [[STEPS[step], *us.values()] for step, us in found.items()]
        tables[name] = {"columns": columns, "rows": rows}
        sizes = [[size, *(by_tile[label][i] for label in by_tile)] for i, size in enumerate(TILES)]
        tables[f"{name}_tiles"] = {"columns": ["tokens at a time", *columns[1:]], "rows": sizes}
    return figures, tables


def store() -> tuple[dict, dict]:
    """New keys and values of T tokens into one layer's pages."""
    from engine.kernels.store_kv import store_kv

    _, Hkv, Dh = HEADS["gpt2_xl"]
    figures, rows = {}, []
    for T in (1, 64, 256, 8192):
        k, v = torch.randn(2, T, Hkv, Dh, device="cuda", dtype=torch.bfloat16)
        keys, values = torch.zeros(2, 1024, P, Hkv, Dh, device="cuda", dtype=torch.bfloat16)
        slots = torch.randperm(1024 * P, device="cuda")[:T]

        def copies(keys=keys, values=values, k=k, v=v, slots=slots) -> None:
            for memory, x in ((keys, k), (values, v)):
                memory.flatten(0, 1).index_copy_(0, slots, x)

        ours = 1e3 * milliseconds(partial(store_kv, k, v, keys, values, slots))
        theirs = 1e3 * milliseconds(copies)
        figures[f"t{T}"] = {"store_kv_us": ours, "index_copy_us": theirs}
        rows.append([T, theirs, ours])
        print("store", *rows[-1], flush=True)
    return figures, {
        "store": {"columns": ["tokens", "two `index_copy_`, µs", "`store_kv`, µs"], "rows": rows}
    }


# Measuring whole steps


def step_milliseconds(engine, batch: int) -> float:
    """The mean of 2 · WINDOW steps, in the middle of which every sequence has CONTEXT tokens."""
    from engine.decoding.params import SamplingParams

    rng, params = random.Random(0), SamplingParams(temperature=0, max_tokens=6 * WINDOW, ignore_eos=True)
    ids = [f"step{i}" for i in range(batch)]
    for name in ids:
        prompt = [rng.randrange(GPT2_XL["vocab_size"]) for _ in range(CONTEXT - 3 * WINDOW)]
        engine.add_request(name, prompt, params)
    seen, times = 0, []
    while len(times) <= 2 * WINDOW:
        outputs = engine.step()
        if outputs and len(outputs) == batch:
            seen = min(len(output.outputs[0].token_ids) for output in outputs)
        if seen >= 2 * WINDOW:
            times.append(time.perf_counter())
    for name in ids:
        engine.abort_request(name)
    while engine.has_unfinished_requests():
        engine.step()
    return (times[-1] - times[0]) / (len(times) - 1) * 1e3


def engines(model, tokenizer, rows: int, length: int) -> dict[str, Callable[[], object]]:
    """By the names of LAUNCHES: what makes an engine for `rows` sequences of `length` tokens."""
    from engine.cache.memory import PageMemory
    from engine.core.ahead import AheadEngine
    from engine.core.llm_engine import LLMEngine
    from engine.execution.graphs import DecodeGraphs, GraphWay, ModelStep, fastest_steps
    from engine.execution.last_tokens import LastTokens
    from engine.execution.runner import EagerWay, ModelRunner, Way
    from engine.kernels.paged_attention import PagedAttention
    from engine.kernels.paged_prefill import PagedPrefill
    from engine.kernels.prompt_rows import gpt2_prompt_forward
    from engine.scheduling.continuous import ContinuousScheduler
    from engine.wiring.attention_kernel import attention_kernel

    config, parameter = model.config, next(model.parameters())
    device, dtype = parameter.device, parameter.dtype
    how = device, dtype, attention_kernel("triton", config.head_dim, device, dtype)
    memory = PageMemory(config, rows * -(-length // P), P, *how, decode=PagedAttention, prefill=PagedPrefill)
    V, width = config.vocab_size, -(-length // P)

    def engine(kind: type[LLMEngine], first: list[Way], last: LastTokens, forward=None) -> LLMEngine:
        ways = [*first, EagerWay(model, memory, forward, last.upload)]
        scheduler = ContinuousScheduler(memory.plan(enable_prefix_caching=False), rows, 8192)
        runner = ModelRunner(ways, memory, last_tokens=last)
        return kind(tokenizer, config, scheduler, runner, max_model_len=length)

    def in_graphs(kind: type[LLMEngine], tuned: bool) -> LLMEngine:
        last, plain = LastTokens(rows, device), ModelStep(model, list(memory.keys), list(memory.values))
        step = fastest_steps(model, memory, rows) if tuned else lambda _: plain
        graphs = DecodeGraphs(step, last, V, rows, width, capture=True)
        return engine(kind, [GraphWay(graphs, V)], last, gpt2_prompt_forward(model))

    def one_by_one() -> LLMEngine:
        return engine(LLMEngine, [], LastTokens(rows, device))

    return {
        "eager": one_by_one,
        "graph": partial(in_graphs, LLMEngine, tuned=False),
        "tuned": partial(in_graphs, LLMEngine, tuned=True),
        "ahead": partial(in_graphs, AheadEngine, tuned=True),
    }


def launches() -> tuple[dict, dict]:
    from engine.models.loader import load_model
    from engine.text.tokenizer import Tokenizer

    folder = dummy_folder(Path(tempfile.mkdtemp()), GPT2_XL)
    model, tokenizer = load_model(folder, "cuda", "bfloat16", "dummy"), Tokenizer.from_pretrained(folder)
    ways = engines(model, tokenizer, max(BATCHES), CONTEXT + 4 * WINDOW)
    made = {name: make() for name, make in ways.items()}  # over one memory, which they use in turns
    figures: dict = {name: {} for name in made} | {"all_ms": {name: {} for name in made}}
    for batch in BATCHES:
        sides = {name: partial(step_milliseconds, engine, batch) for name, engine in made.items()}
        rounds(sides, 1)  # warm
        for name, times in rounds(sides, ROUNDS).items():
            figures[name][f"b{batch}"] = statistics.median(times)
            figures["all_ms"][name][f"b{batch}"] = times
            print("launches", name, batch, times, flush=True)
    columns = ["ms a step"]
    for batch in BATCHES:
        columns += [f"{batch} sequence{'s' * (batch > 1)}", "least to most"]
    rows = []
    for name, label in LAUNCHES.items():
        row: list[str | float] = [label]
        for batch in BATCHES:
            times = figures["all_ms"][name][f"b{batch}"]
            row += [figures[name][f"b{batch}"], f"{min(times):.2f} to {max(times):.2f}"]
        rows.append(row)
    return figures, {"launches": {"columns": columns, "rows": rows}}


@torch.inference_mode()
def main() -> None:
    parts = {"attention": attention, "store": store, "launches": launches}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.manual_seed(0)
    found = {}
    for name in options.only:
        start = time.perf_counter()
        found[name] = parts[name]()
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    timing = "graph replay with a cold cache, median"
    kernels = {"dtype": "bfloat16", "tokens_per_page": P, "timing": timing}
    whole = {"model": "GPT-2 XL's shape, random bf16 weights", "context": CONTEXT}
    for result, workload, names in (
        ("part13_steps", kernels, ("attention", "store")),
        ("part13_launches", whole, ("launches",)),
    ):
        if set(names) <= set(found):
            figures = {name: found[name][0] for name in names}
            tables = {key: table for name in names for key, table in found[name][1].items()}
            record(result, __doc__.splitlines()[0], workload, figures, tables, options.out)


if __name__ == "__main__":
    main()
