"""A story from a quarter and from a sixth of the bytes; then a large model where only a small one has room.

python -m parts run 17
"""

import json
import re
import resource
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from safetensors.torch import save_file  # noqa: E402

from benchmarks.record import OUT, record  # noqa: E402
from benchmarks.shapes import dummy_folder  # noqa: E402
from engine.cache.single import CachedForward  # noqa: E402
from engine.decoding.greedy import generate  # noqa: E402
from engine.decoding.params import SamplingParams  # noqa: E402
from engine.models import gpt2  # noqa: E402
from engine.models.checkpoint import CheckpointError  # noqa: E402
from engine.models.config import ModelConfig  # noqa: E402
from engine.models.loader import load_model  # noqa: E402
from engine.quantization.checkpoint import restore  # noqa: E402
from engine.quantization.codes import pack_nibbles, quantize_groups, quantize_rows  # noqa: E402
from engine.quantization.quantize import (  # noqa: E402
    QuantizationConfig,
    model_bytes,
    pack_quantized,
    quantize,
    skeleton,
)
from engine.text.tokenizer import Tokenizer  # noqa: E402
from parts.stage import title, yes  # noqa: E402

MODEL, PROMPT, TOKENS = "storyteller", "Once upon a time there was a dog", 48
BUDGET = 1000  # MB for everything the process writes to: Python and PyTorch, too
GPT2_MEDIUM = {
    "model_type": "gpt2", "n_embd": 1024, "n_layer": 24, "n_head": 16, "n_positions": 1024,
    "vocab_size": 50257, "eos_token_id": 50256,
}  # fmt: skip


def a_small_matrix(console: Console) -> None:
    weight = torch.tensor(
        [
            [0.50, -1.27, 0.02, 0.00],
            [6.00, 12.70, -0.30, 0.04],
            [0.01, 0.02, -0.03, 0.04],
            [1.0, 2.0, 3.0, 90.0],
        ]
    )
    codes, scale = quantize_rows(weight)
    four, step, low = quantize_groups(weight, 4)
    table = Table("weights", "int8 codes", "scale", "int4 codes", "scale", "low")
    for i in range(4):
        numbers = ["  ".join(f"{float(x):g}" for x in row[i]) for row in (weight, codes, four)]
        table.add_row(
            numbers[0],
            numbers[1],
            f"{float(scale[i]):.5f}",
            numbers[2],
            f"{float(step[i]):.4f}",
            f"{float(low[i]):.2f}",
        )
    console.print(table)
    console.print(
        f"Packed, the four rows of int4 codes are {pack_nibbles(four).tolist()}: two codes to a byte."
    )


def stories(console: Console) -> dict:
    tokenizer, found = Tokenizer.from_pretrained(MODEL), {}
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    table = Table("weights", "MB", "tokens/s", "the story")
    for method in (None, "int8", "int8_dynamic", "int4"):
        transform = None if method is None else partial(quantize, method=method)
        model = load_model(MODEL, transform=transform)
        size = model_bytes(model)
        forward = CachedForward(pack_quantized(model))
        start = time.perf_counter()
        told = generate(forward, tokenizer, model.config, tokenizer.encode(PROMPT), params)
        rate = TOKENS / (time.perf_counter() - start)
        name = method or "fp32"
        found[name] = {"bytes": size, "token_ids": told.outputs[0].token_ids, "tokens_per_second": rate}
        words = PROMPT + told.outputs[0].text.replace("\n", " ")
        table.add_row(name, f"{size / 1e6:.1f}", f"{rate:,.0f}", words)
    console.print(table)
    console.print("One run each, on this machine now. What was measured in quiet is in the article.")
    return found


@torch.no_grad()
def write_large(folder: Path) -> None:
    """GPT-2 medium's shape in int4, of random codes: it was never larger than this."""
    how = QuantizationConfig("int4")
    dummy_folder(folder, GPT2_MEDIUM | {"quantization_config": how.as_json()})
    config = ModelConfig.from_pretrained(folder)
    model = skeleton(gpt2.Model(config, device="meta"), how).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, tensor in tensors.items():
        if tensor.dtype == torch.uint8:
            tensor.random_(0, 256, generator=generator)
        elif tensor.dtype == torch.int8:
            tensor.random_(-127, 128, generator=generator)
        elif name.endswith("scale"):
            tensor.fill_(0.08 / 15 if tensor.dtype == torch.float16 else 0.08 / 254)
        elif name.endswith("low"):
            tensor.fill_(-0.04)
        else:
            tensor.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
    save_file(
        {n: t for n, t in tensors.items() if n not in ("head.codes", "head.scale")},
        folder / "model.safetensors",
    )


def refusal(error: Exception) -> str:
    """PyTorch's words for memory that the system does not give, without its file names and codes."""
    asked = re.search(r"tried to allocate (\d+) bytes", str(error))
    if asked:
        return f"it asked for {int(asked[1]) / 1e6:,.0f} MB more, and was refused"
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def alone(folder: str, load_format: str) -> None:
    """In a process of its own, that may write to BUDGET MB: load, say 4 tokens, and what it took."""
    resource.setrlimit(resource.RLIMIT_DATA, (BUDGET * 10**6, BUDGET * 10**6))
    torch.set_num_threads(1)
    start = time.perf_counter()
    try:
        model = pack_quantized(load_model(folder, load_format=load_format, restore_quantized=restore))
    except (CheckpointError, RuntimeError, MemoryError) as error:
        print(json.dumps({"fits": False, "why": refusal(error)}))
        return
    loaded = time.perf_counter() - start
    tokenizer = Tokenizer.from_pretrained(folder)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    told = generate(CachedForward(model, 64), tokenizer, model.config, [1, 2, 3], params)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    said = {"fits": True, "tokens": len(told.outputs[0].token_ids), "load_seconds": loaded}
    print(json.dumps(said | {"peak_bytes": peak, "weights": model_bytes(model)}))


def in_a_budget(console: Console) -> dict:
    found = {}
    with tempfile.TemporaryDirectory() as name:
        plain, four = Path(name) / "fp32", Path(name) / "int4"
        plain.mkdir(), four.mkdir()
        dummy_folder(plain, GPT2_MEDIUM)
        write_large(four)
        for way, folder, load_format in (("fp32", plain, "dummy"), ("int4", four, "auto")):
            done = subprocess.run(
                [sys.executable, __file__, "--alone", str(folder), load_format],
                capture_output=True,
                text=True,
            )
            assert done.stdout, done.stderr[-800:]
            found[way] = said = json.loads(done.stdout.splitlines()[-1])
            if said["fits"]:
                weights, peak = said["weights"] / 1e6, said["peak_bytes"] / 1e6
                console.print(
                    f"{way}: {weights:,.0f} MB of weights; the process took {peak:,.0f} MB at most, "
                    f"and said {said['tokens']} tokens"
                )
            else:
                console.print(f"{way}: no room: {said['why']}")
    return found


def main() -> None:
    torch.set_num_threads(1)
    console = Console(highlight=False)
    title(console, "1. Four rows of weights")
    a_small_matrix(console)
    title(console, "2. A story from codes")
    told = stories(console)
    title(console, f"3. 355 million weights in a process that may use {BUDGET:,} MB")
    fits = in_a_budget(console)
    plain, four = fits["fp32"], fits["int4"]
    good = not plain["fits"] and four["fits"] and four["peak_bytes"] < BUDGET * 10**6
    console.print(f"\nint4 fits where fp32 does not: [bold]{yes(good)}[/]")
    path = record(
        "part17", "What fits into how much memory?", {"model": MODEL, "budget_mb": BUDGET},
        {"stories": told, "in_a_budget": fits, "fits": good}, folder=OUT,
    )  # fmt: skip
    console.print(f"\n[dim]Figures saved in {path.relative_to(ROOT)}[/]")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--alone"]:
        alone(*sys.argv[2:])
    else:
        main()
