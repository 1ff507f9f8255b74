"""One story on one device and on two ranks, side by side; what each rank holds; then a rank is killed.

python -m parts run A                   # two processes on this machine's CPU; ends by itself
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.record import OUT, record  # noqa: E402
from engine import LLM, SamplingParams  # noqa: E402
from engine.models.config import ModelConfig, architecture  # noqa: E402
from engine.parallel.executor import LeadingExecutor  # noqa: E402
from engine.parallel.launch import RankLost  # noqa: E402
from engine.parallel.shards import divide  # noqa: E402
from parts.stage import Runner, side_by_side, title, yes  # noqa: E402

MODEL, SIZE = "storyteller", 2
PROMPT = "Once upon a time, there was a dog who had a red ball."
TOKENS = 60
OPTIONS = {"device": "cpu", "dtype": "float32", "max_model_len": 256}
COLOURS = ("blue", "dark_orange")
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)


class Teller:
    """A story as it grows."""

    def __init__(self, name: str, llm: LLM) -> None:
        self.name, self.clock, self.text = name, 0.0, ""
        self.token_ids: list[int] = []
        self._stream = llm.stream(PROMPT, GREEDY)

    def advance(self) -> bool:
        start = time.perf_counter()
        output = next(self._stream, None)
        self.clock += time.perf_counter() - start
        if output is None:
            return False
        self.text, self.token_ids = output.outputs[0].text, list(output.outputs[0].token_ids)
        return True


def panel(teller: Runner) -> Panel:
    assert isinstance(teller, Teller)
    words = Text(PROMPT, style="dim") + Text(teller.text, style="")
    return Panel(words, title=teller.name, subtitle=f"{len(teller.token_ids)} tokens, {teller.clock:.2f} s")


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    console = Console(highlight=False)
    with console.status("two engines start, one of them with a second process"):
        one = LLM(MODEL, **OPTIONS)
        two = LLM(MODEL, **OPTIONS, tensor_parallel_size=SIZE)
    try:
        title(console, "1. The same story, told by one device and by two ranks")
        tellers = [Teller("one device", one), Teller(f"{SIZE} ranks", two)]
        side_by_side(console, tellers, panel)
        same = tellers[0].token_ids == tellers[1].token_ids
        console.print(f"\nThe same {TOKENS} tokens: [bold]{yes(same)}[/]")
        sums = 2 * one.config.num_layers
        console.print(f"For each token the ranks add up {sums} times, {sums * TOKENS:,} times in all.")
        console.print("Both share this machine's CPU: here two ranks show what is right, not what is fast.")
        title(console, "2. Who holds what")
        held = show_held(console, ModelConfig.from_pretrained(MODEL))
        title(console, "3. A rank is killed in the middle of a story")
        error, seconds = kill(console, two)
    finally:
        two.shutdown()
    figures = {
        "same_tokens": same, "seconds": {teller.name: teller.clock for teller in tellers}, "held": held,
        "sums_per_token": sums, "error": error, "seconds_to_the_error": seconds,
    }  # fmt: skip
    workload = {"model": MODEL, "prompt": PROMPT, "tokens": TOKENS, "ranks": SIZE}
    path = record("partA", "One story on one device and on two ranks", workload, figures, folder=OUT)
    console.print(f"\n[dim]Figures saved in {path.relative_to(ROOT)}[/]")


def show_held(console: Console, config: ModelConfig) -> dict[str, dict[str, int]]:
    """Draw layers and heads in their ranks' colours; return each side's bytes."""
    per_rank = config.num_heads // SIZE
    for layer in range(config.num_layers):
        line = Text(f"  block {layer}   heads ")
        for head in range(config.num_heads):
            line.append(f" {head} ", style=f"reverse {COLOURS[head // per_rank]}")
            line.append(" ")
        line.append("  MLP ")
        for rank, colour in enumerate(COLOURS):
            width = config.intermediate_size // SIZE
            line.append(f" {rank * width} to {(rank + 1) * width - 1} ".center(16), style=f"reverse {colour}")
            line.append(" ")
        console.print(line)
    console.print(Text("  embeddings, norms: whole on every rank. Output layer: rank 0\n", style="dim"))
    table = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False)
    table.add_column("")
    for column in ("weights in blocks, MB", "all weights, MB", "keys and values, bytes a token"):
        table.add_column(column, justify="right")
    held = {}
    for name, part in (("one device", config), ("each of two ranks", divide(config, SIZE))):
        model = architecture(part.model_type).Model(part, device="meta")  # shapes alone
        blocks, whole = (4 * sum(p.numel() for p in module.parameters()) for module in (model.blocks, model))
        held[name] = {"blocks": blocks, "weights": whole, "kv_bytes_per_token": part.kv_bytes_per_token(4)}
        table.add_row(name, f"{blocks / 1e6:.1f}", f"{whole / 1e6:.1f}", f"{part.kv_bytes_per_token(4):,}")
    console.print(table)
    console.print("\nIn fp32. Counted from the shapes: an engine may pack weights in less.")
    return held


def kill(console: Console, llm: LLM) -> tuple[str, float]:
    """End rank 1's process in the middle of a story: (what the reader gets, after how many seconds)."""
    executor = llm.engine.executor
    assert isinstance(executor, LeadingExecutor)  # of several ranks
    (worker,) = executor.workers.workers
    stream = llm.stream(PROMPT, GREEDY)
    for _ in range(12):
        output = next(stream)
    console.print(f"[dim]{PROMPT}[/]{output.outputs[0].text} [red]…[/]\n")
    console.print(f"kill -9 {worker.process.pid}, which is rank {worker.rank}")
    start = time.perf_counter()
    os.kill(worker.process.pid, signal.SIGKILL)
    try:
        list(stream)
    except RankLost as error:
        seconds = time.perf_counter() - start
        console.print(f"The reader gets, after {seconds:.2f} s: [bold red]RankLost[/]: {error}")
        console.print("Half of every key and value is gone. Nobody gets half of a story as if it were whole.")
        return str(error), seconds
    raise AssertionError("the story went on without rank 1")


if __name__ == "__main__":
    main()
