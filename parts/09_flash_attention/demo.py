"""A softmax that never sees all its numbers, a story told through it, and a text that outgrows the memory.

python -m parts run 9 [-- --attention eager|tiled|sdpa|triton --room 200]
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from math import log
from pathlib import Path

import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.memory import peak_bytes  # noqa: E402
from benchmarks.record import OUT, RESULTS, record  # noqa: E402
from engine.attention.interface import Spans  # noqa: E402
from engine.attention.tiled import RunningSoftmax  # noqa: E402
from engine.cache.single import CachedForward  # noqa: E402
from engine.decoding.greedy import generate  # noqa: E402
from engine.decoding.params import SamplingParams  # noqa: E402
from engine.models.loader import load_model  # noqa: E402
from engine.text.tokenizer import Tokenizer  # noqa: E402
from engine.wiring.attention_kernel import NAMES, attention_kernel, why_no_triton  # noqa: E402
from parts.stage import title, yes  # noqa: E402

MODEL = "storyteller"
PROMPT = "Once upon a time, there was a little dog named Max. Max had a red ball"
TILES = (([1, 2], [4.0, 8.0]), ([4, 1], [12.0, 0.0]), ([16, 8], [20.0, 4.0]))  # e^score, value; a tile each
LENGTHS = (256, 512, 1024, 2048, 4096)
ROOM = 200  # MB beyond the inputs for one layer's attention; eager needs 558 for 4,096 tokens
HEADS, HEAD_DIM = 4, 64
COLOURS = {"eager": "magenta", "tiled": "yellow", "sdpa": "cyan", "triton": "green"}
RECORDED = RESULTS / "part09_prefill_gpu.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--attention", help=f"{', '.join(NAMES)}; default: eager, tiled and sdpa")
    parser.add_argument("--room", type=float, default=ROOM, help="MB for one layer's attention in section 3")
    parser.add_argument("--max-tokens", type=int, default=80, help="of the story")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(highlight=False)
    device = "cuda" if arguments.attention == "triton" and torch.cuda.is_available() else "cpu"
    names = list(dict.fromkeys(["eager", arguments.attention])) if arguments.attention else [*NAMES[:3]]
    try:
        kernels = {name: attention_kernel(name, HEAD_DIM, device) for name in names}
    except ValueError as error:
        sys.exit(str(error))

    lengths = LENGTHS
    if "triton" in names and device == "cpu":  # its interpreter takes its time
        lengths, arguments.max_tokens = LENGTHS[:2], min(4, arguments.max_tokens)

    title(console, "1. A softmax that takes its numbers in tiles, and keeps none")
    figures = {"by_hand": by_hand(console)}
    title(console, "2. The same story with every kernel")
    figures["story"] = story(console, kernels, device, arguments.max_tokens)
    title(console, f"3. A text that doubles, in {arguments.room:,.0f} MB")
    figures["growth"] = growth(console, kernels, device, lengths, arguments.room)
    title(console, "4. What it costs on a GPU (recorded)")
    on_a_gpu(console)

    workload = {"model": MODEL, "heads": HEADS, "head_dim": HEAD_DIM, "lengths": lengths, "kernels": names}
    path = record("part09", "What does a longer text cost each kernel?", workload, figures, folder=OUT)
    console.print(f"\n[dim]Figures saved in {path.relative_to(ROOT)}[/]")


def by_hand(console: Console) -> list[dict[str, float]]:
    """One query, six keys, two at a time."""
    softmax = RunningSoftmax(1, 1, 1)
    table = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False)
    for column in (
        "the tile's e^score",
        "values",
        "maximum, as e^maximum",
        "total",
        "weighted",
        "mean so far",
    ):
        table.add_column(column, justify="right")
    found = []
    for exponentials, values in TILES:
        scores = torch.tensor([log(x) for x in exponentials]).view(1, 1, -1)
        softmax.add(scores, torch.tensor(values).view(1, -1, 1))
        held = {
            "e^maximum": float(softmax.maximum.exp()),
            "total": float(softmax.total),
            "weighted": float(softmax.weighted),
            "mean": float(softmax.mean()),
        }
        found.append(held)
        told = [", ".join(map(str, exponentials)), ", ".join(f"{value:g}" for value in values)]
        table.add_row(*told, *(f"{number:.5g}" for number in held.values()))
    console.print(table)
    terms = [(x, value) for tile in TILES for x, value in zip(*tile, strict=True)]
    mean = sum(x * value for x, value in terms) / sum(x for x, _ in terms)
    same = abs(mean - found[-1]["mean"]) < 1e-5
    console.print(
        f"\nAll six at once give {mean:.5g}. The same: {yes(same)}. Held between two tiles: three numbers, "
        "whether the text has six tokens or a million."
    )
    return found


def story(console: Console, kernels: dict, device: str, most: int) -> dict[str, object]:
    tokenizer, model = Tokenizer.from_pretrained(MODEL), load_model(MODEL, device, "float32")
    params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
    told = {}
    for name, kernel in kernels.items():
        with console.status(f"{name} tells the story"):
            output = generate(CachedForward(model, kernel=kernel), tokenizer, model.config, PROMPT, params)
        told[name] = output.outputs[0].token_ids
        console.print(
            Text(f"{name:7}", style=f"bold {COLOURS[name]}").append(output.outputs[0].text[:95] + "…")
        )
    same = len(set(map(tuple, told.values()))) == 1
    console.print(f"\n{most} tokens each, the same ones: {yes(same)}.")
    return {"tokens": most, "same": same}


@torch.inference_mode()
def growth(
    console: Console, kernels: dict, device: str, lengths: tuple[int, ...], room: float
) -> dict[str, dict[str, list[float | None]]]:
    """One layer's attention over a text that doubles, storyteller's heads, fp32; on a CPU, one thread. A
    kernel that needs more than `room` MB beyond its inputs is refused, and not asked again.
    """
    found: dict[str, dict[str, list[float | None]]] = {name: {"ms": [], "mb": []} for name in kernels}
    needs: dict[str, tuple[int, float]] = {}  # of those that were refused: tokens, MB
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("tokens", justify="right")
    for what in ("ms", "MB"):
        for name in kernels:
            table.add_column(f"{name}, {what}", justify="right", style=COLOURS[name])
    with Live(table, console=console, refresh_per_second=8):
        for length in lengths:
            generator = torch.Generator().manual_seed(0)
            q, k, v = (torch.randn(length, HEADS, HEAD_DIM, generator=generator).to(device) for _ in range(3))
            for name, kernel in kernels.items():
                ms = mb = None
                if name not in needs:
                    call = partial(kernel, q, k, v, Spans.of_one(length, length))
                    mb = peak_bytes(call, device) / 1e6
                    if mb > room:
                        needs[name], mb = (length, mb), None
                    else:
                        ms = milliseconds(call, device)
                found[name]["ms"].append(ms)
                found[name]["mb"].append(mb)
            row = [found[name][what][-1] for what in ("ms", "mb") for name in kernels]
            table.add_row(f"{length:,}", *map(shown, row))
    console.print(f"\n\nIn {room:,.0f} MB beyond the inputs:\n")
    for name, values in found.items():
        held = [(n, mb) for n, mb in zip(lengths, values["mb"], strict=True) if mb is not None]
        longest, most = held[-1] if held else (0, 0.0)
        line = Text(f"{name:7}").append("█" * max(1, round(22 * most / room)), style=COLOURS[name])
        line.append(f" {most:,.1f} MB for {longest:,} tokens")
        if name in needs:
            line.append(f"; refused: {needs[name][0]:,} need {needs[name][1]:,.0f} MB", style="bold red")
        console.print(line)
    return found


def milliseconds(call: Callable[[], object], device: str) -> float:
    """The median of three calls."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1e3


def shown(number: float | None) -> str:
    if number is None:
        return "no room"
    return f"{number:,.3g}" if number < 100 else f"{number:,.0f}"


def on_a_gpu(console: Console) -> None:
    """What benchmarks/part09_prefill_gpu.py has recorded."""
    recorded = json.loads(RECORDED.read_text())
    rows = recorded["figures"]["growth"]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("tokens", justify="right")
    for what in ("ms", "MB"):
        for name in COLOURS:
            table.add_column(f"{name}, {what}", justify="right", style=COLOURS[name])
    for i, length in enumerate(rows["lengths"]):
        numbers = [rows[name][what][i] for what in ("ms", "mb") for name in COLOURS]
        told = ["" if n is None else f"{n:,.0f}" if n >= 100 else f"{n:,.3g}" for n in numbers]
        table.add_row(f"{length:,}", *told)
    console.print(table)
    machine = f"{recorded['machine']['gpu']}, torch {recorded['versions']['torch']}, {recorded['date']}"
    console.print(
        f"\n{machine}, bf16, 16 heads of 64, one sequence, MB beyond the inputs. Empty: out of memory, or "
        "(tiled) not run. From benchmarks/results/part09_prefill_gpu.json."
    )
    gpu_or_cpu = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    reason = why_no_triton(HEAD_DIM, gpu_or_cpu, torch.float32)
    here = f"Not here: our Triton kernel {reason}." if reason else "It runs here: --attention triton."
    console.print(f"[dim]{here}[/]")


if __name__ == "__main__":
    main()
