"""A story, one token at a time: what the loop chose from, the text as it streams, and what it cost.

python -m parts run 2 [-- --prompt "One day, a cat" --stop "." --max-tokens 220]
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path

import torch
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.record import OUT, record  # noqa: E402
from engine.decoding.greedy import DecodeStep, Forward, FullForward, decode_steps, top_candidates  # noqa: E402
from engine.decoding.params import ParameterError, SamplingParams  # noqa: E402
from engine.models.loader import load_model  # noqa: E402
from engine.text.tokenizer import Tokenizer  # noqa: E402

MODEL = "storyteller"
PROMPT = "Once upon a time, there was a little dog named Max. Max had a red ball"
LOOKED_AT = 12  # tokens whose rivals are shown
BARS = " ▁▂▃▄▅▆▇█"


class Watched:
    """Any forward, with a record of each call: how many tokens it was given and how long it took."""

    def __init__(self, forward: Forward) -> None:
        self.forward = forward
        self.tokens: list[int] = []
        self.seconds: list[float] = []

    def __call__(self, token_ids: Sequence[int]) -> Tensor:
        start = time.perf_counter()
        logits = self.forward(token_ids)  # [V]
        self.seconds.append(time.perf_counter() - start)
        self.tokens.append(len(token_ids))
        return logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--stop", action="append", default=[], help="text that ends the story (repeatable)")
    parser.add_argument("--max-tokens", type=int, default=220)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # a second one makes a model this small slower: part03_kv_cache
    console = Console(highlight=False)

    tokenizer, model = Tokenizer.from_pretrained(MODEL), load_model(MODEL)
    forward = Watched(FullForward(model))
    try:
        params = SamplingParams(temperature=0, max_tokens=arguments.max_tokens, stop=tuple(arguments.stop))
        steps = decode_steps(forward, tokenizer, model.config, arguments.prompt, params)
    except ParameterError as error:
        sys.exit(f"demo: {error}")

    console.rule("[bold]1. What the loop chooses from", align="left")
    vocabulary = f"{model.config.vocab_size:,}"
    console.print(f"\n[dim]At every step {vocabulary} tokens are weighed, and the likeliest is taken.[/]\n")
    first = list(watch(islice(steps, LOOKED_AT), tokenizer, console))

    console.print()
    console.rule("[bold]2. The story", align="left")
    console.print()
    console.out(arguments.prompt, style="bold", end="", highlight=False)
    for step in chain(first, steps):
        console.out(step.text, end="", highlight=False)

    console.print("\n")
    console.rule("[bold]3. What it cost", align="left")
    console.print()
    figures = summarise(forward, step)
    console.print(costs(forward, figures))
    path = record(
        "part02", "What does a story cost without a cache?",
        {"model": MODEL, "prompt": arguments.prompt, "max_tokens": arguments.max_tokens,
         "stop": arguments.stop, "greedy": True},
        figures, folder=OUT,
    )  # fmt: skip
    console.print(f"\n[dim]Figures saved in {path.relative_to(ROOT)}[/]")


def watch(steps: Iterator[DecodeStep], tokenizer: Tokenizer, console: Console) -> Iterator[DecodeStep]:
    """Hand the steps on, drawing a table of what each was chosen from."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("step", justify="right")
    table.add_column("chosen", min_width=10, no_wrap=True)
    table.add_column("how sure", min_width=15, no_wrap=True)
    table.add_column("next best", no_wrap=True)
    with Live(Group(table, Text()), console=console, refresh_per_second=30):
        for number, step in enumerate(steps, 1):
            best, *others = top_candidates(step.logits, tokenizer, k=4)
            rivals = Text("   ").join(
                Text.assemble(visible(rival.text), (f" {rival.probability:.0%}", "dim")) for rival in others
            )
            table.add_row(
                str(number),
                Text(visible(best.text), style="bold green"),
                Text.assemble(f"{best.probability:>4.0%} ", ("█" * round(best.probability * 10), "green")),
                rivals,
            )
            yield step


def visible(text: str) -> str:
    """A token's text with its spaces and line ends to be seen."""
    return text.replace(" ", "·").replace("\n", "↵")


def summarise(forward: Watched, last: DecodeStep) -> dict:
    """The run in numbers. The display's own time is not in them."""
    seconds, count = forward.seconds, len(forward.seconds)
    few = max(1, min(16, count // 2))
    return {
        "prompt_tokens": forward.tokens[0],
        "new_tokens": count,
        "finish_reason": last.finish_reason,
        "stop_reason": last.output.stop_reason,
        "time_to_first_token_ms": seconds[0] * 1e3,
        "first_tokens_ms": sum(seconds[:few]) / few * 1e3,
        "last_tokens_ms": sum(seconds[-few:]) / few * 1e3,
        "averaged_over": few,
        "tokens_per_second": count / sum(seconds),
        "tokens_computed": sum(forward.tokens),
        "ms_per_token": [round(taken * 1e3, 2) for taken in seconds],
    }


def costs(forward: Watched, figures: dict) -> Group:
    """Statistics, and the time of each token as a row of bars."""
    why = {
        "stop": "the model ended the story"
        if figures["stop_reason"] is None
        else f"the stop string {figures['stop_reason']!r} came up",
        "length": "the limit was reached",
    }[figures["finish_reason"]]
    few = figures["averaged_over"]
    table = Table(show_header=False, box=None, padding=(0, 2), pad_edge=False)
    table.add_row("prompt", f"{figures['prompt_tokens']} tokens")
    table.add_row("story", f"{figures['new_tokens']} tokens; {why}")
    table.add_row("time to first token", f"{figures['time_to_first_token_ms']:.1f} ms")
    table.add_row(f"a token, first {few}", f"{figures['first_tokens_ms']:.1f} ms")
    table.add_row(f"a token, last {few}", f"[bold yellow]{figures['last_tokens_ms']:.1f} ms[/]")
    table.add_row("speed", f"{figures['tokens_per_second']:.0f} tokens/s")
    needed = figures["prompt_tokens"] + figures["new_tokens"] - 1
    table.add_row("work", f"{figures['tokens_computed']:,} tokens through the model, for {needed:,} places")
    return Group(table, Text("\nTime per token, from the first to the last:\n"), bars(forward.seconds))


def bars(seconds: list[float], width: int = 60) -> Text:
    """One bar for each group of tokens, as high as the group's mean time."""
    groups = [seconds[i * len(seconds) // width : (i + 1) * len(seconds) // width] for i in range(width)]
    means = [sum(group) / len(group) for group in groups if group]
    drawn = "".join(BARS[max(1, round(mean / max(means) * (len(BARS) - 1)))] for mean in means)
    return Text.assemble((drawn, "yellow"), f"  {means[0] * 1e3:.0f} ms to {means[-1] * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
