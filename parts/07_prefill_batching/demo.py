"""Five stories at once: packed into one forward pass, then written together, in a race against a queue.

python -m parts run 7 [-- --max-tokens 128]
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.record import OUT, record  # noqa: E402
from engine.cache.slots import SlotCache, SlotMemory  # noqa: E402
from engine.core.llm_engine import LLMEngine  # noqa: E402
from engine.decoding.params import SamplingParams  # noqa: E402
from engine.execution.runner import EagerWay, ModelRunner  # noqa: E402
from engine.layers.packed_linear import pack_linears  # noqa: E402
from engine.layers.prefill import pack, run_prefill  # noqa: E402
from engine.models.loader import load_model  # noqa: E402
from engine.requests.listeners import Listener, Listeners, StepRecord  # noqa: E402
from engine.scheduling.fifo import FIFOScheduler  # noqa: E402
from engine.scheduling.scheduler import Scheduler  # noqa: E402
from engine.scheduling.static import StaticScheduler  # noqa: E402
from engine.text.tokenizer import Tokenizer  # noqa: E402
from parts.stage import side_by_side, title, yes  # noqa: E402

MODEL = "storyteller"
PROMPTS = {
    "A": "Once upon a time, there was a little dog named Max. Max had a red ball",
    "B": "One day, a cat",
    "C": "Lily and her mom went to the park. They saw a big tree and",
    "D": "Tom was sad because",
    "E": "The sun was warm. A small bird sat on the",
}
COLOURS = dict(zip(PROMPTS, ("cyan", "magenta", "green", "yellow", "bright_blue"), strict=True))
WIDTH = len(PROMPTS)
RAGGED = {"A": 60, "B": 12, "C": 30, "D": 6, "E": 21}  # tokens asked for, where lengths differ
LINES = 3  # of each story, its last ones
STATIC = partial(StaticScheduler, max_num_seqs=WIDTH)


class Steps(Listener):
    """Keeps every step's record."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def on_step(self, record: StepRecord) -> None:
        self.records.append(record)


class Runner:
    """One side of the race: an engine with all five requests in it, and its own clock."""

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        model: nn.Module,
        places: int,
        make_scheduler: Callable[[SlotCache], Scheduler],
        tokens: dict[str, int],
    ) -> None:
        self.name, self.steps, self.clock = name, Steps(), 0.0
        memory = SlotMemory(model.config, places)
        scheduler, runner = make_scheduler(memory.plan()), ModelRunner([EagerWay(model, memory)], memory)
        self.engine = LLMEngine(tokenizer, model.config, scheduler, runner, Listeners([self.steps]))
        self.text = dict.fromkeys(PROMPTS, "")
        self.first: dict[str, float] = {}  # seconds on this side's clock
        self.last: dict[str, float] = {}
        for letter, prompt in PROMPTS.items():
            params = SamplingParams(temperature=0, max_tokens=tokens[letter], ignore_eos=True)
            self.engine.add_request(letter, prompt, params)

    def advance(self) -> bool:
        """One step; False when there is none left."""
        if not self.engine.has_unfinished_requests():
            return False
        start = time.perf_counter()
        outputs = self.engine.step()
        self.clock += time.perf_counter() - start
        for output in outputs:
            letter = output.request_id
            self.text[letter] = output.outputs[0].text
            self.first.setdefault(letter, self.clock)
            if output.finished:
                self.last[letter] = self.clock
        return True

    @property
    def tokens(self) -> int:
        """Written so far: each sequence in a step gets one."""
        return sum(len(step.request_ids) for step in self.steps.records)

    def panel(self, width: int, console: Console) -> Panel:
        rows = Table.grid(padding=(0, 1))
        for letter, colour in COLOURS.items():
            story = Text(PROMPTS[letter], style="dim") + Text(self.text[letter], style=colour)
            wrapped = story.wrap(console, width - 8) if letter in self.first else [Text("waits")]
            lines = [line for line in wrapped if line.plain.strip()][-LINES:]
            lines += [Text()] * (LINES - len(lines))
            rows.add_row(Text(letter, style=f"bold {colour}"), Text("\n").join(lines))
        title = f"{self.name}: {self.tokens} tokens, {self.clock:.2f} s"
        return Panel(rows, title=title, height=WIDTH * LINES + 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-tokens", type=int, default=128, help="of each story in the race")
    most = parser.parse_args().max_tokens
    torch.set_num_threads(1)  # a second one makes a model this small slower: part03_kv_cache
    console = Console(highlight=False)
    tokenizer = Tokenizer.from_pretrained(MODEL)
    alone = load_model(MODEL, transform=pack_linears)  # packed for steps of one row
    crowd = load_model(MODEL, transform=partial(pack_linears, rows=WIDTH))

    title(console, "1. Five prompts in one forward pass")
    figures = {"prefill": one_pass(console, tokenizer, crowd)}
    title(console, "2. The race: a queue and a crowd, each given the same time to compute")
    figures["race"] = race(console, tokenizer, alone, crowd, dict.fromkeys(PROMPTS, most))
    title(console, "3. What a static batch wastes, when some want more than others")
    figures["ragged"] = ragged(console, tokenizer, crowd)

    workload = {"model": MODEL, "prompts": PROMPTS, "max_tokens": most, "ragged": RAGGED}
    path = record(
        "part07", "What do five prompts cost in a row, and together?", workload, figures, folder=OUT
    )
    console.print(f"\n[dim]Figures saved in {path.relative_to(ROOT)}[/]")


def one_pass(console: Console, tokenizer: Tokenizer, model: nn.Module) -> dict[str, object]:
    """Padded and packed, a character per token; then the pass, and every prompt's next token."""
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS.values()]
    longest, packed = max(map(len, prompts)), pack(prompts)
    total = len(packed.token_ids)
    console.print(f"Padded: {WIDTH} rows as long as the longest, {WIDTH * longest} tokens to compute.\n")
    for prompt, (letter, colour) in zip(prompts, COLOURS.items(), strict=True):
        row = Text("  ").append(letter * len(prompt), style=f"bold {colour}")
        console.print(row.append("·" * (longest - len(prompt)), style="dim"))
    console.print(f"\nPacked: one axis of {total} tokens, nothing in vain.\n")
    spans = list(zip(pairwise(packed.query_start), COLOURS.items(), strict=True))
    row, positions = Text("  "), Text("  ")
    for (a, b), (letter, colour) in spans:
        row.append(letter * (b - a), style=f"bold {colour}")
        positions.append("".join(str(p % 10) for p in packed.positions[a:b].tolist()), style=colour)
    console.print(row)
    console.print(positions.append("   positions, last digit", style="dim"))
    console.print(f"\n  query_start = {list(packed.query_start)}\n")

    logits = run_prefill(model, prompts)  # [S, V]
    console.print(f"One pass gives logits {list(logits.shape)} [S, V]. What each prompt would say next:\n")
    for (letter, prompt), choice in zip(PROMPTS.items(), logits.argmax(-1).tolist(), strict=True):
        told = Text(f"  {prompt}").append(tokenizer.decode([choice]), style=f"bold {COLOURS[letter]} reverse")
        console.print(told)
    return {"tokens": total, "padded_tokens": WIDTH * longest, "wasted": 1 - total / (WIDTH * longest)}


def race(
    console: Console, tokenizer: Tokenizer, alone: nn.Module, crowd: nn.Module, tokens: dict[str, int]
) -> dict[str, object]:
    queue = Runner("in series", tokenizer, alone, 1, FIFOScheduler, tokens)
    batch = Runner("together", tokenizer, crowd, WIDTH, STATIC, tokens)
    runners = [queue, batch]
    side_by_side(console, runners, lambda runner: runner.panel(console.width // 2, console))

    columns = (
        "",
        "steps",
        "ms per step",
        "seconds",
        "tokens/s",
        "E begins after",
        "a story, on average",
    )
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column else "left")
    found = {}
    for runner in runners:
        steps, wait = len(runner.steps.records), statistics.mean(runner.last.values())
        found[runner.name] = {
            "steps": steps,
            "ms_per_step": runner.clock / steps * 1e3,
            "seconds": runner.clock,
            "tokens_per_second": runner.tokens / runner.clock,
            "first_word_of_the_last": runner.first["E"],
            "mean_wait": wait,
        }
        table.add_row(
            runner.name, str(steps), f"{runner.clock / steps * 1e3:.2f}", f"{runner.clock:.2f}",
            f"[bold]{runner.tokens / runner.clock:,.0f}[/]", f"{runner.first['E'] * 1e3:.0f} ms",
            f"{wait * 1e3:.0f} ms",
        )  # fmt: skip
    same = queue.text == batch.text
    faster = queue.clock / batch.clock
    console.print(
        Group(
            Text(),
            table,
            Text(f"\nTogether: {faster:.1f} times the throughput. Every story is the same: {yes(same)}."),
        )
    )
    return found | {"times_series": faster, "same_text": same}


def ragged(console: Console, tokenizer: Tokenizer, model: nn.Module) -> dict[str, object]:
    """A row for each request: the steps it was in, and those in which its place stood empty."""
    runner = Runner("ragged", tokenizer, model, WIDTH, STATIC, RAGGED)
    while runner.advance():
        pass
    steps = [{id.partition("/")[0] for id in step.request_ids} for step in runner.steps.records]
    for letter, colour in COLOURS.items():
        row = Text("  ")
        for here in steps:
            row.append("█" if letter in here else "·", style=colour if letter in here else "dim")
        console.print(row.append(f"  {letter}, {RAGGED[letter]} tokens", style=f"bold {colour}"))
    places, used = WIDTH * len(steps), sum(map(len, steps))
    console.print(
        f"\n{len(steps)} steps with {WIDTH} places: {used} of {places} in use, "
        f"[bold]{1 - used / places:.0%} empty[/]. A request that waits may not have them, until Part 8."
    )
    return {"steps": len(steps), "places": places, "used": used, "empty": 1 - used / places}


if __name__ == "__main__":
    main()
