"""How fast is prefill attention on a GPU, beside PyTorch's, and what does each step of tuning bring?

    python -m benchmarks.part09_prefill_gpu [--out FOLDER]       # a minute and a half on one H200

Packed causal attention, bf16. Each side is captured ten times over in a CUDA graph, so that only the GPU's
time counts; sides take turns, and the median of the rounds is kept. PyTorch's kernels for a batch (cuDNN,
FlashAttention 2) take equal lengths alone; `varlen_attn` takes what we take. Then: the steps of tuning, each
made or undone by a change in a kernel's text; time and memory against length; and a forward pass in GPT-2
XL's shape.
"""

import argparse
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
import triton
from rich import print
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

import engine.kernels.flash_prefill
import engine.kernels.flash_prefill_tma
from benchmarks.memory import peak_bytes
from benchmarks.record import RESULTS, record
from benchmarks.workloads import gpt2_like
from engine.attention.dense import causal_attention, dense_attention
from engine.attention.interface import Spans, VarlenKernel
from engine.attention.varlen import max_length
from engine.kernels.flash_prefill import flash_prefill
from engine.kernels.flash_prefill_tma import flash_prefill_tma
from engine.layers.prefill import run_prefill
from engine.models.loader import load_model
from engine.wiring.attention_kernel import attention_kernel

SHAPES = {  # query heads, key heads, width
    "dh64": (16, 16, 64),
    "dh128_grouped": (16, 8, 128),
    "dh128": (16, 16, 128),
}
WORK = {  # lengths of the sequences, 8,192 in all
    "8x1024": [1024] * 8,
    "1x8192": [8192],
    "mixed": [2048, 100, 1500, 37, 1024, 700, 1900, 883],
}
LABELS = {
    "dh64": "64",
    "dh128_grouped": "128, grouped",
    "dh128": "128",
    "8x1024": "8×1,024",
    "1x8192": "1×8,192",
    "mixed": "mixed",
    "tuned": "ours",
    "plain": "plain",
    "varlen": "`varlen_attn`",
    "cudnn": "cuDNN",
}
PACKED = ("varlen", "nested")
BATCHED = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash2": SDPBackend.FLASH_ATTENTION}
CALLS, ROUNDS = 10, 9
# Steps of tuning: what changes in the text of flash_prefill.py. Each goes on from the one before.
STAGES = ("num_stages=2", "num_stages=3")
EXP2 = (("tl.exp(", "tl.exp2("), ("Dh**-0.5,", "Dh**-0.5 * 1.4426950408889634,"))
HEAVY = ("first = tl.program_id(0) * ROWS", "first = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS")
HEADS = (
    (
        "head, sequence = tl.program_id(1), tl.program_id(2)",
        "head, sequence = tl.program_id(0), tl.program_id(2)",
    ),
    ("tl.num_programs(0) - 1 - tl.program_id(0)", "tl.num_programs(1) - 1 - tl.program_id(1)"),
    (
        "triton.cdiv(max_length(spans.query_start), tile), Hq,",
        "Hq, triton.cdiv(max_length(spans.query_start), tile),",
    ),
)
# The tuned kernel without descriptors: an address for each number. Takes tensors without gaps, as used here.
QUERY = "q + (q_start + row).to(tl.int64)[:, None] * out_token + head * DH + tl.arange(0, DH_PADDED)[None, :]"
KEY = "(k_start + start + col).to(tl.int64)[:, None] * (out_token // GROUP) + kv_head * DH"
KEY += " + tl.arange(0, DH_PADDED)[None, :], mask=(start + col < Tk)[:, None], other=0.0"
POINTERS = (
    ("*(_descriptor(x, padded) for x in (q, k, v)), out,", "q, k, v, out,"),
    (
        "q.load([head, q_start + first, 0]).reshape(TILE, DH_PADDED)",
        f"tl.load({QUERY}, mask=(row < Tq)[:, None], other=0.0)",
    ),
    ("k.load([kv_head, k_start + start, 0]).reshape(TILE, DH_PADDED)", f"tl.load(k + {KEY})"),
    ("v.load([kv_head, k_start + start, 0]).reshape(TILE, DH_PADDED)", f"tl.load(v + {KEY})"),
)


def packed(shape: tuple[int, int, int], lengths: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Spans]:
    (Hq, Hkv, Dh), starts = shape, (0, *accumulate(lengths))
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(starts[-1], H, Dh, generator=generator, device="cuda", dtype=torch.bfloat16)
        for H in (Hq, Hkv, Hkv)
    )
    return q, k, v, Spans(starts, starts)


def captured(call: Callable[[], object]) -> Callable[[], None]:
    """CALLS calls as one CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # compiles, and warms up
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return graph.replay


def microseconds(sides: dict[str, Callable[[], object]]) -> dict[str, float]:
    """The GPU's time for one call of each side. A side that cannot run here is left out, and says why."""
    replays = {}
    for name, call in sides.items():
        try:
            replays[name] = captured(call)
        except Exception as error:  # a kernel that this GPU or this PyTorch lacks
            print(f"  {name} left out: {str(error).splitlines()[0][:120]}")
    found: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(ROUNDS):
        for name, replay in replays.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            replay()  # warm: the caches hold this side's data, as they would in a loop over layers
            start.record()
            replay()
            end.record()
            torch.cuda.synchronize()
            found[name].append(start.elapsed_time(end) * 1e3 / CALLS)
    return {name: statistics.median(values) for name, values in found.items()}


def sides_of(shape: tuple[int, int, int], lengths: Sequence[int]) -> dict[str, Callable[[], object]]:
    q, k, v, spans = packed(shape, lengths)
    Hq, Hkv, _ = shape
    sides = {
        "tuned": partial(flash_prefill_tma, q, k, v, spans),
        "plain": partial(flash_prefill, q, k, v, spans),
    }
    starts, most = spans.on(q.device)[0], max_length(spans.query_start)
    # Keys repeated beforehand, outside the clock, where varlen_attn knows no grouped heads.
    wide_k, wide_v = (x.repeat_interleave(Hq // Hkv, 1) if Hq != Hkv else x for x in (k, v))
    sides["varlen"] = lambda: varlen_attn(q, wide_k, wide_v, starts, starts, most, most, window_size=(-1, 0))
    # As jagged nested tensors, which PyTorch hands to the kernel that it holds for the best.
    bounds = {"min_seqlen": min(lengths), "max_seqlen": most}
    jagged = [
        torch.nested.nested_tensor_from_jagged(x, starts.long(), **bounds).transpose(1, 2)
        for x in (q, wide_k, wide_v)
    ]
    sides["nested"] = lambda: F.scaled_dot_product_attention(*jagged, is_causal=True)
    if len(set(lengths)) > 1:  # no batch
        return sides
    batch = [
        x.view(len(lengths), lengths[0], *x.shape[1:]).transpose(1, 2) for x in (q, k, v)
    ]  # [S, H, T, Dh]
    for name, backend in BATCHED.items():

        def batched(backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(*batch, is_causal=True, enable_gqa=Hq != Hkv)

        sides[name] = batched
    return sides


def relative_error(kernel: VarlenKernel, shape: tuple[int, int, int], lengths: Sequence[int]) -> float:
    """‖got − want‖ / ‖want‖, against fp32 arithmetic on the same bf16 numbers."""
    q, k, v, spans = packed(shape, lengths)
    want = dense_attention(q.float(), k.float(), v.float(), spans)
    return float((kernel(q, k, v, spans).float() - want).norm() / want.norm())


def race() -> tuple[dict, dict]:
    """By shape and work: microseconds of each side, our speed beside the best of PyTorch's, our error."""
    found, rows = {}, []
    shown = ("tuned", "plain", "varlen", "cudnn")
    for shape_name, shape in SHAPES.items():
        for work_name, lengths in WORK.items():
            times = microseconds(sides_of(shape, lengths))
            flops = sum(4 * n * (n + 1) / 2 * shape[0] * shape[2] for n in lengths)
            packed_best = min((name for name in PACKED if name in times), key=times.get)
            batched_best = min((name for name in BATCHED if name in times), key=times.get, default=None)
            found[f"{shape_name}_{work_name}"] = {
                "us": times,
                "tflops": {name: flops / value / 1e6 for name, value in times.items()},
                "best_packed": packed_best,
                "times_packed": times[packed_best] / times["tuned"],
                "best_batched": batched_best,
                "times_batched": times[batched_best] / times["tuned"] if batched_best else None,
                "error": relative_error(flash_prefill_tma, shape, lengths),
                "error_plain": relative_error(flash_prefill, shape, lengths),
            }
            print(f"{shape_name}_{work_name}", {name: round(value, 1) for name, value in times.items()})
            rows.append([LABELS[shape_name], LABELS[work_name], *(times.get(name) for name in shown)])
    works = list(found.values())
    for key in ("times_packed", "times_batched"):
        times = [work[key] for work in works if work[key]]  # what is of mixed lengths makes no batch
        found[f"least_{key}"], found[f"most_{key}"] = min(times), max(times)
    columns = ["heads", "sequences", *(f"{LABELS[name]}, µs" for name in shown)]
    return found, {"columns": columns, "rows": rows}


def changed(module: ModuleType, changes: Sequence[tuple[str, str]], folder: Path) -> ModuleType:
    """The module with pieces of its text replaced: a kernel as it was before a step of tuning."""
    text = Path(module.__file__).read_text()
    for before, after in changes:
        assert before in text, before
        text = text.replace(before, after)
    path = folder / f"variant_{len(list(folder.iterdir()))}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def tuning() -> tuple[dict, dict]:
    """Microseconds after each step, on the two shapes and works of the bar."""
    plain, tuned = engine.kernels.flash_prefill, engine.kernels.flash_prefill_tma
    cases = [(shape, work) for shape in ("dh64", "dh128_grouped") for work in ("8x1024", "1x8192")]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        steps = {
            "plain: pointers and masks": plain.flash_prefill,
            "three tiles in flight": changed(plain, [STAGES], place).flash_prefill,
            "exp2": changed(plain, [STAGES, *EXP2], place).flash_prefill,
            "heaviest tiles first": changed(plain, [STAGES, *EXP2, HEAVY], place).flash_prefill,
            "heads are neighbours": changed(plain, [STAGES, *EXP2, HEAVY, *HEADS], place).flash_prefill,
            "two loops": changed(tuned, POINTERS, place).flash_prefill_tma,
            "descriptors (TMA)": tuned.flash_prefill_tma,
        }
        found: dict[str, list[float]] = {name: [] for name in steps}
        for shape, work in cases:
            q, k, v, spans = packed(SHAPES[shape], WORK[work])
            times = microseconds({name: partial(kernel, q, k, v, spans) for name, kernel in steps.items()})
            for name in steps:
                found[name].append(times[name])
            print("steps", shape, work, {name: round(value, 1) for name, value in times.items()})
    rows = [[name, *values] for name, values in found.items()]
    return found, {
        "columns": ["step, µs", *(f"{LABELS[shape]}; {LABELS[work]}" for shape, work in cases)],
        "rows": rows,
    }


def growth() -> tuple[dict, dict]:
    """One sequence of growing length: milliseconds, and megabytes beyond the inputs at the peak."""
    lengths, shape = (1024, 2048, 4096, 8192, 16384, 32768, 65536), SHAPES["dh64"]
    names = ("eager", "tiled", "sdpa", "triton")
    found = {name: {"ms": [], "mb": []} for name in names}
    for length in lengths:
        q, k, v, spans = packed(shape, [length])
        for name in names:
            ms = mb = None
            kernel = attention_kernel(name, shape[2], "cuda", torch.bfloat16)
            if not (name == "tiled" and length > 8192):  # a loop of small calls: nothing new to see, and slow
                try:
                    kernel(q, k, v, spans)  # compiles, and warms up
                    mb = peak_bytes(partial(kernel, q, k, v, spans), "cuda") / 1e6
                    times = []
                    for _ in range(3):
                        start = time.perf_counter()
                        kernel(q, k, v, spans)
                        torch.cuda.synchronize()
                        times.append(time.perf_counter() - start)
                    ms = statistics.median(times) * 1e3
                except torch.OutOfMemoryError:
                    print(f"{name} at {length}: out of memory")
            torch.cuda.empty_cache()
            found[name]["ms"].append(ms)
            found[name]["mb"].append(mb)
    rows = [
        [length, *(found[name][key][i] for key in ("ms", "mb") for name in names)]
        for i, length in enumerate(lengths)
    ]
    columns = ["tokens", *(f"{name}, {unit}" for unit in ("ms", "MB") for name in names)]
    for row in rows:
        print("growth", row)
    return {"lengths": lengths, **found}, {"columns": columns, "rows": rows}


def whole_model() -> dict[str, float]:
    """Milliseconds of `run_prefill` of 8 x 1,024 tokens, random weights in GPT-2 XL's shape."""
    with tempfile.TemporaryDirectory() as folder:
        where = gpt2_like(Path(folder), 48, 1600, 25, 50257)
        model = load_model(where, "cuda", "bfloat16", load_format="dummy")
    prompts = [[(7 * i + j) % 50000 for j in range(1024)] for i in range(8)]
    kernels = {
        name: attention_kernel(name, 64, "cuda", torch.bfloat16) for name in ("eager", "sdpa", "triton")
    }
    found: dict[str, list[float]] = {name: [] for name in kernels}
    for _ in range(4):
        for name, kernel in kernels.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            run_prefill(model, prompts, kernel)
            torch.cuda.synchronize()
            found[name].append(time.perf_counter() - start)
    return {name: statistics.median(values[1:]) * 1e3 for name, values in found.items()}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    out = parser.parse_args().out
    torch.set_float32_matmul_precision("highest")
    start = time.perf_counter()
    causal_attention(
        *(torch.ones(2, 1, 64, device="cuda") for _ in range(3))
    )  # the first call loads libraries
    results, tables = {}, {}
    results["race"], tables["race"] = race()
    results["tuning"], tables["tuning"] = tuning()
    results["growth"], tables["growth"] = growth()
    results["whole_model_ms"] = whole_model()
    print(results["whole_model_ms"], f"{time.perf_counter() - start:.0f} s")
    results["triton"], results["cudnn"] = triton.__version__, torch.backends.cudnn.version()
    workload = {"shapes": SHAPES, "lengths": WORK, "dtype": "bfloat16", "calls": CALLS, "rounds": ROUNDS}
    record("part09_prefill_gpu", __doc__.splitlines()[0], workload, results, tables, folder=out)


if __name__ == "__main__":
    main()
