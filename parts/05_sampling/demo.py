"""One prompt, four tempers: greedy and creative stories side by side, with their seed and their price.

python -m parts run 5 [-- --prompt "In the garden, there was a tiny" --seed 1 --max-tokens 90]
"""

import argparse
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.record import OUT, record  # noqa: E402
from engine.cache.single import CachedForward  # noqa: E402
from engine.decoding.greedy import decode_steps  # noqa: E402
from engine.decoding.params import SamplingParams  # noqa: E402
from engine.decoding.sampling import SUPPORTS, distribution, draw, sampler  # noqa: E402
from engine.decoding.sampling_state import SamplingState  # noqa: E402
from engine.layers.packed_linear import pack_linears  # noqa: E402
from engine.models.loader import load_model  # noqa: E402
from engine.text.tokenizer import Tokenizer  # noqa: E402
from parts.stage import yes  # noqa: E402

MODEL = "storyteller"
PROMPT = "Lily opened the box and found a"
TEMPERS = {  # name -> (what the dice do, colour)
    "greedy": ({"temperature": 0}, "blue"),
    "careful": ({"temperature": 0.7, "top_p": 0.95}, "green"),
    "bold": ({"temperature": 1.3, "min_p": 0.1}, "yellow"),
    "untamed": ({"temperature": 1.5}, "red"),
}
WORDS = 6  # likeliest next words shown in section 1
LINES = 11  # of each story, its last ones
SAMPLES = 3
CROWD = 31  # strangers in the batch of section 3


class Story:
    """One temper's story: Part 2's loop around Part 3's cache, with a sampler for `choose`."""

    def __init__(
        self,
        model: torch.nn.Module,
        tokenizer: Tokenizer,
        prompt: str,
        params: SamplingParams,
        index: int = 0,
    ) -> None:
        self.text, self.token_ids, self.probabilities = "", [], []
        self.forward_seconds, self.choose_seconds = 0.0, 0.0
        ids = tokenizer.encode(prompt)
        self._forward, self._choose = CachedForward(model), sampler(params, ids, index)
        self._steps = decode_steps(self.forward, tokenizer, model.config, ids, params, self.choose, SUPPORTS)

    def forward(self, token_ids: list[int]) -> Tensor:
        start = time.perf_counter()
        logits = self._forward(token_ids)  # [V]
        self.forward_seconds += time.perf_counter() - start
        return logits

    def choose(self, logits: Tensor) -> int:
        start = time.perf_counter()
        token_id = self._choose(logits)
        self.choose_seconds += time.perf_counter() - start
        return token_id

    def advance(self) -> bool:
        """One more token; False when there is none."""
        step = next(self._steps, None)
        if step:
            self.token_ids.append(step.token_id)
            self.text += step.text
            self.probabilities.append(float(step.logits.softmax(-1)[step.token_id]))
        return step is not None

    def tell(self) -> "Story":
        while self.advance():
            pass
        return self


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=90)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # a second one makes a model this small slower: part03_kv_cache
    console = Console(highlight=False)
    tokenizer, model = Tokenizer.from_pretrained(MODEL), load_model(MODEL, transform=pack_linears)
    prompt = arguments.prompt
    try:
        wishes = {
            name: SamplingParams(max_tokens=arguments.max_tokens, seed=arguments.seed, **knobs)
            for name, (knobs, _) in TEMPERS.items()
        }
        stories = {name: Story(model, tokenizer, prompt, params) for name, params in wishes.items()}
    except ValueError as error:  # ParameterError among them
        sys.exit(f"demo: {error}")

    console.rule("[bold]1. The same opinion, bent four ways", align="left")
    console.print(Text.assemble("\n", (prompt, "bold"), (" … what the model thinks comes next:\n", "dim")))
    logits = CachedForward(model)(tokenizer.encode(prompt))  # [V]
    console.print(bent(logits, wishes, tokenizer), Text())

    console.rule("[bold]2. Four stories", align="left")
    console.print(Text.assemble("\n", (prompt, "bold"), (f" …  (seed {arguments.seed})", "dim")))
    with Live(console=console, refresh_per_second=12) as live:
        while [story for story in stories.values() if story.advance()]:
            live.update(panels(stories, console))
        live.update(panels(stories, console))
    console.print(Text(), verdict(stories), Text())

    console.rule("[bold]3. Seeds keep their word", align="left")
    kept, samples = promises(model, tokenizer, prompt, wishes["bold"], logits, console)

    figures = {
        "promises_kept": kept,
        "samples": samples,
        "stories": {
            name: {
                "token_ids": story.token_ids,
                "repeated_runs": repeated(story.token_ids),
                "long_shots": long_shots(story),
                "forward_ms_per_token": story.forward_seconds * 1e3 / len(story.token_ids),
                "choose_ms_per_token": story.choose_seconds * 1e3 / len(story.token_ids),
            }
            for name, story in stories.items()
        },
    }
    workload = {
        "model": MODEL, "prompt": prompt, "seed": arguments.seed, "max_tokens": arguments.max_tokens,
        "tempers": {name: knobs for name, (knobs, _) in TEMPERS.items()},
    }  # fmt: skip
    path = record("part05", "What do greedy and creative make of one prompt?", workload, figures, folder=OUT)
    console.print(f"\n[dim]Figures saved in {path.relative_to(ROOT)}[/]")


def label(knobs: dict) -> str:
    return ", ".join(f"{name.replace('_', '-')} {value}" for name, value in knobs.items())


def bent(logits: Tensor, wishes: dict[str, SamplingParams], tokenizer: Tokenizer) -> Table:
    """A column of bars per temper, from one call of `distribution` for all of them."""
    rows = [SamplingState(params, [], [], seed=0) for params in wishes.values()]
    probs = distribution(logits.expand(len(rows), -1), rows)  # [R, V]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("next")
    for name, (knobs, colour) in TEMPERS.items():
        table.add_column(f"[{colour}]{name}[/]\n[dim]{label(knobs)}[/]", min_width=16)
    for id in logits.topk(WORDS).indices.tolist():
        cells = [
            Text.assemble((f"{p:>4.0%} ", "" if p else "dim"), ("█" * round(p * 10), colour))
            for p, (_, colour) in zip(probs[:, id].tolist(), TEMPERS.values(), strict=True)
        ]
        table.add_row(Text(tokenizer.decode([id]).replace(" ", "·"), style="bold"), *cells)
    possible = (probs > 0).sum(-1).tolist()
    table.add_row("[dim]possible[/]", *(f"[dim]{count:,} token{'s' * (count > 1)}[/]" for count in possible))
    return table


def panels(stories: dict[str, Story], console: Console) -> Table:
    """The stories in two by two panels."""
    grid = Table.grid(expand=True)
    grid.add_column(ratio=1)
    grid.add_column(ratio=1)
    drawn = []
    for name, story in stories.items():
        knobs, colour = TEMPERS[name]
        wrapped = Text(story.text.strip()).wrap(console, console.width // 2 - 4)
        lines = [line for line in wrapped if line.plain.strip()]
        body, title = Text("\n").join(lines[-LINES:]), f"[bold]{name}[/] {label(knobs)}"
        drawn.append(Panel(body, title=title, height=LINES + 2, border_style=colour))
    grid.add_row(*drawn[:2])
    grid.add_row(*drawn[2:])
    return grid


def repeated(token_ids: list[int], length: int = 4) -> float:
    """Share of runs of `length` tokens that stood in the story before."""
    runs = [tuple(token_ids[i : i + length]) for i in range(len(token_ids) - length + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def long_shots(story: Story) -> int:
    """Tokens that the model itself gave less than one chance in a hundred."""
    return sum(p < 0.01 for p in story.probabilities)


def verdict(stories: dict[str, Story]) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False)
    table.add_column("")
    for column in ("tokens", "4-token repeats", "tokens under 1%", "forward", "choice"):
        table.add_column(column, justify="right")
    for name, story in stories.items():
        count = len(story.token_ids)
        table.add_row(
            f"[{TEMPERS[name][1]}]{name}[/]",
            str(count),
            f"{repeated(story.token_ids):.0%}",
            str(long_shots(story)),
            f"{story.forward_seconds * 1e3 / count:.2f} ms",
            f"{story.choose_seconds * 1e3 / count:.2f} ms",
        )
    return table


def promises(
    model: torch.nn.Module, tokenizer: Tokenizer, prompt: str, params: SamplingParams, logits: Tensor,
    console: Console,
) -> tuple[bool, list[str]]:  # fmt: skip
    """Samples of one seed, one of them told again, and one draw in a crowd; whether all came out the same."""
    short = SamplingParams(
        temperature=params.temperature, min_p=params.min_p, seed=params.seed, n=SAMPLES, max_tokens=18
    )
    samples = [Story(model, tokenizer, prompt, short, index).tell() for index in range(SAMPLES)]
    console.print(f"\n[dim]n = {SAMPLES} samples of seed {params.seed}:[/]")
    for index, story in enumerate(samples):
        console.print(Text(f"  seed {params.seed + index}:{story.text}".replace("\n", " ")))
    again = Story(model, tokenizer, prompt, short, index=SAMPLES - 1).tell()
    same_story = again.token_ids == samples[-1].token_ids

    seeds = [10_000 + stranger for stranger in range(CROWD)] + [params.seed]
    rows = [SamplingState(short, [], [], seed) for seed in seeds]
    probs = distribution(logits.expand(len(rows), -1), rows)  # [R, V]
    in_a_crowd = draw(probs, seeds, [0] * len(seeds))  # [R]
    alone = draw(probs[-1:], seeds[-1:], [0])  # [1]
    same_token = bool(alone[0] == in_a_crowd[-1])
    console.print(f"Seed {params.seed + SAMPLES - 1} told again: the same story: {yes(same_story)}")
    console.print(f"Seed {params.seed} in a batch with {CROWD} strangers: the same token: {yes(same_token)}")
    return same_story and same_token, [story.text for story in samples]


if __name__ == "__main__":
    main()
