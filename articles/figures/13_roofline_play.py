"""What the roofline slider knows: shapes, machines, and steps that were measured, all from the records.

python articles/figures/13_roofline_play.py      # writes 13_roofline.play.json; play_roofline.js draws it

A decode step takes at least as long as its bytes take at the machine's bandwidth, and at least as long as its
arithmetic takes at the machine's peak: `pieces` adds both up, as play_roofline.js does for its sliders. Where
a machine was measured, these two are what a bare read or copy and a large product reached; of the others the
maker says them.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import fmean, median

from drawing import result
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks.shapes import GPT3_6_7B  # noqa: E402
from engine.models.config import ModelConfig, architecture  # noqa: E402

TARGET = Path(__file__).with_name("13_roofline.play.json")
SHAPES = ROOT / "engine" / "models" / "shapes"
PREFILL = 8 * 1024  # tokens in the matrix products that part13_engine times
QWEN3_CONTEXT = 512  # of part20_qwen3's steps
DECODED = 64  # Extension A: of a longer prompt the prompt itself was measured, and no decode step
PUBLISHED = {  # bytes/s, FLOP/s in bf16 without sparsity
    "h100": {
        "words": "H100",
        "bandwidth": 3.35e12,
        "peak": 1979e12 / 2,
        "source": "published: NVIDIA's data sheet of the H100 SXM, 3.35 TB/s, and 1,979 TFLOP/s in bf16 with "
        "sparsity, half of them without (nvidia.com/en-us/data-center/h100)",
    },
    "rtx4060": {
        "words": "laptop, RTX 4060",
        "bandwidth": 128 / 8 * 16e9,
        "peak": 233e12 / 8,
        "source": "published: NVIDIA's page of laptops with an RTX 4060, 128 bits of GDDR6 (16 Gbit/s "
        "each), and 233 AI TOPS, 8-bit products with sparsity, of which bf16 summed in fp32 has an eighth "
        "(nvidia.com/en-us/geforce/gaming-laptops/compare)",
    },
}


# --- shapes -------------------------------------------------------------------------------------------------


@cache
def shapes() -> dict[str, dict]:
    """By name, smallest first: storyteller, the shapes of engine/models/shapes, and part17_gpu's GPT-3."""
    with tempfile.TemporaryDirectory() as name:
        (folder := Path(name) / "gpt3-6.7b").mkdir()
        (folder / "config.json").write_text(json.dumps(GPT3_6_7B))
        found = {path.name: shape(path) for path in (Path("storyteller"), folder, *SHAPES.iterdir())}
    return dict(sorted(found.items(), key=lambda item: item[1]["weights"]))


def shape(folder: Path) -> dict:
    """What a decode step reads and computes, counted on the model itself, which gets no memory for that.

    A table of which a step reads one row a token is left out: positions, and an embedding that is not the
    output layer, too.
    """
    config = ModelConfig.from_pretrained(folder)
    model = architecture(config.model_type).Model(config, "meta")
    tables = [model.embed_position] if hasattr(model, "embed_position") else []
    tables += [] if config.tie_word_embeddings else [model.embed]
    qkv = model.blocks[0].attention.qkv
    linears = [layer for layer in model.blocks[0].modules() if isinstance(layer, nn.Linear)]
    return {
        "weights": sum(p.numel() for p in model.parameters()) - sum(t.weight.numel() for t in tables),
        "block_weights": config.num_layers * sum(layer.weight.numel() for layer in linears),
        "key_head_weights": config.num_layers
        * 2
        * config.head_dim
        * (qkv.in_features + (qkv.bias is not None)),
        "layers": config.num_layers,
        "query_heads": config.num_heads,
        "key_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "longest": config.max_positions,
    }


# --- machines -----------------------------------------------------------------------------------------------


@cache
def machines() -> dict[str, dict]:
    """By name: bytes/s, FLOP/s, the bytes of a number in the cache, and where the first two are from."""
    reads, rows, gpu = map(result, ("part03_memory_bound", "part07_batching", "part13_engine"))
    if processor(reads) != processor(rows):
        raise ValueError("part03_memory_bound and part07_batching are of two machines: measure both on one")
    read = reads["figures"]["gpt2_shape"]["threads_1"]["gigabytes_per_second"]["bare read"]
    row_us, products_ms = rows["figures"]["linear_us_per_row"][-1], gpu["figures"]["prefill"]["products_ms"]
    measured = {
        "cpu": {
            "words": f"one thread, {processor(reads)}",
            "bandwidth": read * 1e9,
            "peak": 2 * rows["figures"]["split"]["storyteller"]["weights"] / row_us * 1e6,
            "source": "measured: a bare read of GPT-2's weights (part03_memory_bound), and storyteller's "
            f"linear layers on {rows['figures']['linear_rows'][-1]} rows (part07_batching)",
        },
        "h200": {
            "words": "H200",
            "bandwidth": gpu["figures"]["copy_terabytes_per_second"] * 1e12,
            "peak": 2 * PREFILL * shapes()["gpt2-xl"]["block_weights"] / products_ms * 1e3,
            "source": f"measured: a copy, and the matrix products of {PREFILL:,} tokens (part13_engine)",
        },
    }
    return {
        name: it | {"key_bytes": 4 if name == "cpu" else 2} for name, it in (measured | PUBLISHED).items()
    }


def processor(record: dict) -> str:
    return record["machine"]["cpu"]


# --- the arithmetic -----------------------------------------------------------------------------------------


def pieces(model: str, machine: str, batch: int, context: float, bits: int, key_heads: int = 0) -> dict:
    """Seconds of each piece of a step of `batch` sequences of `context` tokens. key_heads=0: the model's.

    `weights` and `keys` wait for memory, `products` with weights and `scores` of attention for arithmetic.
    """
    it, on = shapes()[model], machines()[machine]
    key_heads = key_heads or it["key_heads"]
    weights = it["weights"] + (key_heads - it["key_heads"]) * it["key_head_weights"]
    numbers = batch * context * it["layers"] * it["head_dim"]  # of a head
    return {
        "weights": weights * bits / 8 / on["bandwidth"],
        "keys": numbers * 2 * key_heads * on["key_bytes"] / on["bandwidth"],
        "products": 2 * weights * batch / on["peak"],
        "scores": numbers * 4 * it["query_heads"] / on["peak"],
    }


def waits(*step: object) -> tuple[float, float]:
    """Seconds for memory, and seconds for arithmetic, of `pieces(*step)`."""
    found = pieces(*step)  # type: ignore[arg-type]
    return found["weights"] + found["keys"], found["products"] + found["scores"]


# --- steps that were measured -------------------------------------------------------------------------------


def dots() -> list[dict]:
    """The measured decode steps of these shapes on these machines: `ms`, what ran, and whose record it is."""
    found = [*part_3(), *part_7(), *part_17_on_a_cpu(), *part_13(), *part_17(), *part_20(), *extension_a()]
    keys = ("machine", "model", "batch", "context", "bits", "ms", "what", "record")
    return [dict(zip(keys, dot, strict=True)) for dot in found]


ON_A_CPU = {"storyteller": "storyteller", "gpt2_shape": "gpt2"}  # a record's name of the shape, and ours


def part_3() -> Iterator[tuple]:
    figures = result(name := "part03_memory_bound")["figures"]
    for key, model in ON_A_CPU.items():
        for form, bits in {"nn.Linear": 32, "Half": 16}.items():
            if step := figures[key]["threads_1"]["forms"].get(form):
                yield "cpu", model, 1, figures["context"], bits, step["step_ms"], form, name


def part_7() -> Iterator[tuple]:
    record = result(name := "part07_batching")
    context = fmean(record["workload"]["crowd_context"])
    for key, model in ON_A_CPU.items():
        for batch, ms in zip(
            record["figures"]["crowds"], record["figures"]["split"][key]["step_ms"], strict=True
        ):
            yield "cpu", model, batch, context, 16, ms, "packed weights", name


def part_17_on_a_cpu() -> Iterator[tuple]:
    record = result(name := "part17_one_request_gpt2_shape")
    if processor(record) != processor(result("part03_memory_bound")) or record["workload"]["threads"] != 1:
        return
    for side, bits in {"fp32": 32, "int8": 8, "int8_dynamic": 8, "int4": 4}.items():
        ms = 1e3 / record["figures"]["tokens_per_second"][side]
        yield "cpu", "gpt2", 1, mean_context(record), bits, ms, side, name


def part_13() -> Iterator[tuple]:
    record = result(name := "part13_engine")
    for batch, step in record["figures"]["step"].items():
        yield "h200", "gpt2-xl", int(batch[1:]), record["workload"]["context"], 16, step["ms"], "bf16", name


def part_17() -> Iterator[tuple]:
    for name in ("part17_gpu_gpt2_xl", "part17_gpu_gpt3_6_7b"):
        record = result(name)
        for side, bits in {"bf16": 16, "int8": 8, "int4": 4}.items():
            ms = record["figures"][side]["ms"]
            yield "h200", record["workload"]["shape"], 1, mean_context(record), bits, ms, side, name


def part_20() -> Iterator[tuple]:
    figures = result(name := "part20_qwen3")["figures"]
    for model in ("qwen3-0.6b", "qwen3-4b"):
        for batch, step in figures[model.replace(".", "_")]["step"].items():
            yield "h200", model, int(batch[1:]), QWEN3_CONTEXT, 16, step["ms"], "bf16", name


def extension_a() -> Iterator[tuple]:
    record = result(name := "partA_devices_gpu")
    for model in ("qwen3-0.6b", "qwen3-4b"):
        for work, rounds in record["figures"]["sides"][f"{model}, one GPU"]["ms"].items():
            batch, prompt = map(int, work.split("x"))
            if prompt <= DECODED:
                context = prompt + record["workload"]["decoded"] / 2
                yield "h100", model, batch, context, 16, median(rounds), "bf16", name


def mean_context(record: dict) -> float:
    """Tokens that a sequence has in the middle of its answer."""
    return record["workload"]["prompt_tokens"] + record["workload"]["new_tokens"] / 2


# --- what articles ask --------------------------------------------------------------------------------------


def answers() -> dict[str, dict]:
    """Numbers in the answers to what articles ask of the slider: tools/render_tables.py puts them there."""
    memory, arithmetic = waits("gpt2", "cpu", 1, 64, 32)
    crowds = ((batch, waits("gpt2", "cpu", batch, 64, 16)) for batch in range(1, 257))
    many = pieces("gpt2-xl", "h200", 256, 512, 16)
    second = price_per_hour() / 3600
    dollars = {n: max(waits("storyteller", "cpu", n, 64, 16)) / n * second * 1e6 for n in (1, 16)}
    return {
        "part03": {
            "memory_ms": memory * 1e3,
            "arithmetic_ms": arithmetic * 1e3,
            "times": memory / arithmetic,
        },
        "part07": {"turns": next(batch for batch, (memory, arithmetic) in crowds if arithmetic > memory)},
        "part13": {
            "keys_share": many["keys"] / (many["weights"] + many["keys"]),
            "ms": max(waits("gpt2-xl", "h200", 256, 512, 16)) * 1e3,
            "one_head_ms": max(waits("gpt2-xl", "h200", 256, 512, 16, 1)) * 1e3,
        },
        "part17": {
            f"bits_{bits}_ms": max(waits("gpt3-6.7b", "h200", 1, 128, bits)) * 1e3 for bits in (16, 8, 4)
        },
        "part19": {"dollars_1": dollars[1], "dollars_16": dollars[16], "times": dollars[1] / dollars[16]},
    }


def price_per_hour() -> float:
    """Part 19's, in dollars."""
    return result("part19_utilisation")["figures"]["price_per_hour"]


def recording() -> dict:
    """The content of TARGET."""
    return {
        "view": "roofline",
        "price_per_hour": price_per_hour(),
        "models": shapes(),
        "machines": machines(),
        "dots": dots(),
        "answers": answers(),
    }


if __name__ == "__main__":
    TARGET.write_text(json.dumps(recording(), indent=1) + "\n")
    print(TARGET.name, TARGET.stat().st_size // 1024, "kB")
