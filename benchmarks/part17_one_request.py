"""One request on a CPU, batch 1: what do int8 weights gain, beside fp32 and CTranslate2?

    python -m benchmarks.part17_one_request [--threads 2] [--rounds 5] [--tokens 32]

GPT-2 124M's shape (or --model storyteller), random weights, the same checkpoint for all sides; Part 3's loop,
greedy, end of sequence ignored. All sides in one process, in turns; medians. CTranslate2 quantizes it itself.
This engine's weights lie on huge pages, as in `LLM`.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks.part08_against_others import gpt2_shape
from benchmarks.record import quartiles, record, show, spread
from benchmarks.workloads import fp32_twin
from engine.cache.single import CachedForward
from engine.decoding.greedy import generate
from engine.decoding.params import SamplingParams
from engine.layers.packed_linear import pack_linears
from engine.machine.huge_pages import huge_pages
from engine.models.loader import load_model
from engine.quantization.quantize import pack_quantized, quantize
from engine.text.tokenizer import Tokenizer

PROMPT = 16  # tokens
KEYS = {
    "this engine, fp32": "fp32", "this engine, int8": "int8", "this engine, int8_dynamic": "int8_dynamic",
    "this engine, int4": "int4", "CTranslate2, float32": "ctranslate2_fp32",
    "CTranslate2, int8": "ctranslate2_int8",
}  # fmt: skip
OURS = {"fp32": None, "int8": "int8", "int8_dynamic": "int8_dynamic", "int4": "int4"}


def ours(folder: Path, tokens: int, method: str | None, pages: Callable = huge_pages) -> Callable[[], object]:
    def transform(model):
        return pack_linears(model) if method is None else pack_quantized(quantize(model, method))

    with pages():
        model = load_model(folder, transform=transform)
    tokenizer = Tokenizer.from_pretrained(folder)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    prompt = list(range(5, 5 + PROMPT))
    return lambda: generate(CachedForward(model), tokenizer, model.config, prompt, params)


def ctranslate2(folder: Path, tokens: int, threads: int, compute_type: str) -> Callable[[], object]:
    import ctranslate2
    from ctranslate2.converters import TransformersConverter

    with tempfile.TemporaryDirectory() as converted:
        TransformersConverter(str(folder)).convert(converted, force=True)
        generator = ctranslate2.Generator(converted, compute_type=compute_type, intra_threads=threads)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    names = {id: name for name, id in vocabulary.items()}
    prompt = [[names[id] for id in range(5, 5 + PROMPT)]]
    options = {"max_length": tokens, "min_length": tokens, "include_prompt_in_result": False}
    return lambda: generator.generate_batch(prompt, end_token=[], **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="gpt2-shape", choices=["gpt2-shape", "storyteller"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    make = {"gpt2-shape": gpt2_shape, "storyteller": fp32_twin}[options.model]
    with tempfile.TemporaryDirectory() as name, torch.inference_mode():
        folder = make(Path(name))
        sides = {f"this engine, {side}": partial(ours, method=way) for side, way in OURS.items()}
        sides |= {
            f"CTranslate2, {kind}": partial(ctranslate2, threads=options.threads, compute_type=kind)
            for kind in ("float32", "int8")
        }
        runs = {side: set_up(folder, options.tokens) for side, set_up in sides.items()}
        rates: dict[str, list[float]] = {side: [] for side in runs}
        for _ in range(options.rounds + 1):
            for side, run in runs.items():
                start = time.perf_counter()
                run()
                rates[side].append(options.tokens / (time.perf_counter() - start))
    counted = {side: values[1:] for side, values in rates.items()}  # the first warms up
    speed = {side: statistics.median(values) for side, values in counted.items()}
    base = speed["this engine, fp32"]
    rows = [[side, rate, rate / base, spread(counted[side])] for side, rate in speed.items()]
    columns = ["side", "tokens/s", "× this engine's fp32", "tokens/s in rounds"]
    tables = {"race": {"columns": columns, "rows": rows}}
    path = record(
        f"part17_one_request_{options.model.replace('-', '_')}",
        "One request on a CPU, batch 1: what do int8 weights gain, beside fp32 and CTranslate2?",
        {"model": options.model, "prompt_tokens": PROMPT, "new_tokens": options.tokens, "batch": 1,
         "threads": options.threads, "rounds": options.rounds},
        {"tokens_per_second": {KEYS[side]: rate for side, rate in speed.items()},
         "rounds": {KEYS[side]: quartiles(values) for side, values in counted.items()},
         "int8_over_fp32": speed["this engine, int8"] / base,
         "dynamic_over_fp32": speed["this engine, int8_dynamic"] / base,
         "int4_over_fp32": speed["this engine, int4"] / base,
         "dynamic_over_ctranslate2": speed["this engine, int8_dynamic"] / speed["CTranslate2, int8"]},
        tables,
    )  # fmt: skip
    show(path, tables)


if __name__ == "__main__":
    main()
