"""A race: the same story without a cache and with one, each given the same processor time.

python -m parts run 3 [-- --prompt "One day, a cat" --max-tokens 256]
"""

import argparse
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.record import OUT, record  # noqa: E402
from engine.cache.single import CachedForward  # noqa: E402
from engine.decoding.greedy import Forward, FullForward, decode_steps  # noqa: E402
from engine.decoding.params import ParameterError, SamplingParams  # noqa: E402
from engine.layers.packed_linear import pack_linears  # noqa: E402
from engine.models.config import ModelConfig  # noqa: E402
from engine.models.loader import load_model  # noqa: E402
from engine.text.tokenizer import Tokenizer  # noqa: E402
from parts.stage import side_by_side  # noqa: E402

MODEL = "storyteller"
PROMPT = "Once upon a time, there was a little dog named Max. Max had a red ball"
COLOURS = ("yellow", "green", "cyan")
LINES = 16  # of each story, its last ones


class Runner:
    """One side of the race: Part 2's loop around some forward, whose time alone is counted."""

    def __init__(
        self, name: str, forward: Forward, tokenizer: Tokenizer, config: ModelConfig, arguments
    ) -> None:
        self.name, self.forward = name, forward
        self.text, self.token_ids, self.seconds = arguments.prompt, [], []
        params = SamplingParams(temperature=0, max_tokens=arguments.max_tokens)
        self.steps = decode_steps(self.timed, tokenizer, config, arguments.prompt, params)

    def timed(self, token_ids: Sequence[int]) -> Tensor:
        start = time.perf_counter()
        logits = self.forward(token_ids)  # [V]
        self.seconds.append(time.perf_counter() - start)
        return logits

    @property
    def clock(self) -> float:
        return sum(self.seconds)

    def advance(self) -> bool:
        """One more token; False when there is none."""
        step = next(self.steps, None)
        if step:
            self.token_ids.append(step.token_id)
            self.text += step.text
        return step is not None

    def panel(self, console: Console) -> Panel:
        lines = Text(self.text).wrap(console, console.width // 2 - 4)
        title = f"{self.name}: {len(self.token_ids)} tokens, {self.clock:.2f} s"
        return Panel(Text("\n").join(lines[-LINES:]), title=title, height=LINES + 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-tokens", type=int, default=256)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # a second one makes a model this small slower: part03_kv_cache
    console = Console(highlight=False)

    tokenizer, model = Tokenizer.from_pretrained(MODEL), load_model(MODEL)
    packed = load_model(MODEL, transform=pack_linears)
    config = model.config
    forwards = {
        "no cache": FullForward(model),
        "cache": CachedForward(model),
        "cache, packed weights": CachedForward(packed),
    }
    try:
        full, cached, lean = (Runner(n, f, tokenizer, config, arguments) for n, f in forwards.items())
    except ParameterError as error:
        sys.exit(f"demo: {error}")

    console.rule("[bold]1. What is kept", align="left")
    console.print(memory(forwards["cache"], config))
    console.rule("[bold]2. The race: each side computes for the same time", align="left")
    console.print()
    side_by_side(console, [full, cached], lambda runner: runner.panel(console))
    while lean.advance():
        pass

    console.print()
    console.rule("[bold]3. What it cost", align="left")
    runners = [full, cached, lean]
    console.print(costs(runners))
    same = full.token_ids == cached.token_ids == lean.token_ids
    console.print(
        f"All three wrote the same {len(full.token_ids)} tokens: [bold]{'yes' if same else 'NO'}[/]"
    )
    figures = {
        "same_tokens": same,
        "kv_bytes_per_token": config.kv_bytes_per_token(4),
        "tokens_per_second": {runner.name: len(runner.token_ids) / runner.clock for runner in runners},
        "ms_per_token": {runner.name: [round(s * 1e3, 3) for s in runner.seconds] for runner in runners},
    }
    workload = {"model": MODEL, "prompt": arguments.prompt, "max_tokens": arguments.max_tokens}
    path = record("part03", "What does a story cost with a cache?", workload, figures, folder=OUT)
    console.print(f"\n[dim]Figures saved in {path.relative_to(ROOT)}[/]")


def memory(forward: CachedForward, config: ModelConfig) -> Group:
    """The cache's size, once from the formula and once from the tensors."""
    L, Hkv, Dh, cache = config.num_layers, config.num_kv_heads, config.head_dim, forward.cache
    size = cache.keys.element_size()
    from_formula, from_tensors = config.kv_bytes_per_token(size), cache.num_bytes // cache.max_tokens
    table = Table(show_header=False, box=None, padding=(0, 2), pad_edge=False)
    table.add_row("formula", f"2 (K and V) × {L} layers × {Hkv} heads × {Dh} numbers × {size} bytes")
    table.add_row("", f"= [bold]{from_formula:,}[/] bytes per token")
    table.add_row("tensors", f"keys and values, each {list(cache.keys.shape)} [L, tokens, Hkv, Dh]")
    table.add_row("", f"{cache.num_bytes:,} bytes / {cache.max_tokens:,} tokens = [bold]{from_tensors:,}[/]")
    return Group(Text(), table, Text())


def costs(runners: list[Runner]) -> Group:
    """Tokens per second of each side, and its time per token along the story."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in ("", "tokens/s", "first token", "tokens 2 to 17", "last 16"):
        table.add_column(column, justify="left" if not column else "right")
    for runner, colour in zip(runners, COLOURS, strict=True):
        stretches = runner.seconds[:1], runner.seconds[1:17] or runner.seconds, runner.seconds[-16:]
        speed = f"[bold]{len(runner.token_ids) / runner.clock:,.0f}[/]"
        table.add_row(f"[{colour}]{runner.name}[/]", speed, *(f"{mean_ms(s):.2f} ms" for s in stretches))
    return Group(Text(), table, Text("\nTime for one token, along the story:\n"), bars(runners), Text())


def bars(runners: list[Runner], rows: int = 6, width: int = 44) -> Table:
    """A row per stretch of the story, a bar per side, all on one scale."""
    rows = min(rows, len(runners[0].seconds))
    cuts = [round(i * len(runners[0].seconds) / rows) for i in range(rows + 1)]
    means = [[mean_ms(runner.seconds[a:b]) for runner in runners] for a, b in pairwise(cuts)]
    scale = width / max(map(max, means))
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, show_header=False)
    for (a, b), row in zip(pairwise(cuts), means, strict=True):
        drawn = [
            ("█" * max(1, round(ms * scale)) + f" {ms:.1f} ms\n", c)
            for ms, c in zip(row, COLOURS, strict=True)
        ]
        table.add_row(f"{a + 1:>4} to {b}", Text.assemble(*drawn))
    return table


def mean_ms(seconds: list[float]) -> float:
    return sum(seconds) / len(seconds) * 1e3


if __name__ == "__main__":
    main()
