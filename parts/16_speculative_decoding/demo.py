"""Two models write one story: what the small one proposed, what stood, and whether it is the same story.

python -m parts run 16
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.part16_engines import (  # noqa: E402
    PROMPTS,
    Fixed,
    Models,
    Seen,
    load,
    plain,
    tell,
    watch,
    with_draft_model,
    with_ngrams,
)
from benchmarks.record import OUT, RESULTS, record  # noqa: E402
from engine.decoding.params import SamplingParams  # noqa: E402
from parts.stage import title, yes  # noqa: E402

TOKENS, DRAFTS, STEPS = 80, 4, 8
STORY, REFRAIN = PROMPTS[1], "Mom said no. Dad said no. Mom said no. Dad said no. Mom said no."
STOOD, FELL, OWN = "green", "red strike", "bold"


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    console = Console(highlight=False)
    with console.status("two models are loaded"):
        models = load()
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    figures = {}

    title(console, f"1. Step by step: {DRAFTS} drafts, and what the large model says to them")
    engine = with_draft_model(models, Fixed(DRAFTS))
    seen = watch(engine)
    (told,), _ = tell(engine, [STORY], greedy)
    for number, step in enumerate(seen[:STEPS]):
        console.print(Text(f"step {number:2}  ", style="dim") + one_step(models, step))
    console.print(
        "\n[green]green[/]: stood. [red strike]red[/]: did not. [bold]bold[/]: the large model's own."
    )

    title(console, "2. The story")
    console.print(story(models, STORY, seen))
    (alone,), _ = tell(plain(models), [STORY], greedy)
    figures["model"] = verdict(console, seen, told == alone)

    title(console, "3. Without a second model: what followed here the last time?")
    engine = with_ngrams(models, Fixed(DRAFTS))
    seen = watch(engine)
    (told,), _ = tell(engine, [REFRAIN], greedy)
    console.print(story(models, REFRAIN, seen))
    (alone,), _ = tell(plain(models), [REFRAIN], greedy)
    figures["ngram"] = verdict(console, seen, told == alone)

    title(console, "4. With dice: temperature 0.9, a seed, three times")
    dice = SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=40, ignore_eos=True)
    engine = with_draft_model(models, Fixed(DRAFTS))
    seen, texts = watch(engine), [tell(engine, [STORY], dice)[0][0] for _ in range(3)]
    console.print(story(models, STORY, seen[: len(seen) // 3]))
    (alone,), _ = tell(plain(models), [STORY], dice)
    same = all(told == alone for told in texts)
    console.print(f"\nThe same each time, and as without drafts: [bold]{yes(same)}[/]")
    console.print("Without a seed it is another story each time, from the same distribution.")
    figures["same_for_a_seed"] = same

    title(console, "5. What it is worth (recorded)")
    recorded(console)
    path = record("part16", "Which drafts stand?", {"story": STORY, "tokens": TOKENS}, figures, folder=OUT)
    console.print(f"\n[dim]Figures saved in {path.relative_to(ROOT)}[/]")


def one_step(models: Models, step: Seen) -> Text:
    stood = len(step.tokens) - 1
    line = Text()
    for i, draft in enumerate(step.drafts):
        line.append(shown(models, [draft]), style=STOOD if i < stood else FELL)
    line.append(" → ", style="dim")
    return line + Text(shown(models, step.tokens[-1:]), style=OWN)


def story(models: Models, prompt: str, seen: list[Seen]) -> Text:
    """The text, what the proposer said in colour."""
    text = Text(prompt, style="dim")
    for step in seen:
        text.append(shown(models, step.tokens[:-1]), style=STOOD)
        text.append(shown(models, step.tokens[-1:]), style=OWN)
    return text


def shown(models: Models, ids: list[int]) -> str:
    return models.tokenizer.decode(ids).replace("\n\n", " ¶ ").replace("\n", " ¶ ")


def verdict(console: Console, seen: list[Seen], same: bool) -> dict:
    tokens, proposed = sum(len(step.tokens) for step in seen), sum(len(step.drafts) for step in seen)
    stood = tokens - len(seen)
    console.print(
        f"\n{tokens} tokens in {len(seen)} steps: {tokens / len(seen):.2f} a step; "
        f"of {proposed} drafts {stood} stood.\n"
        f"The same text as without drafts: [bold]{yes(same)}[/]"
    )
    return {"tokens": tokens, "steps": len(seen), "proposed": proposed, "stood": stood, "same": same}


def recorded(console: Console) -> None:
    found = json.loads((RESULTS / "part16_speculation.json").read_text())
    for key in ("one", "crowd"):
        content = found["tables"][key]
        table = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False)
        for i, column in enumerate(content["columns"]):
            table.add_column(column, justify="right" if i else "left")
        for name, *cells in content["rows"]:
            table.add_row(str(name), *(f"{cell:,.0f}" if cell >= 100 else f"{cell:.2f}" for cell in cells))
        console.print(table)
        console.print()
    console.print(f"{found['machine']['cpu']}, one thread, {found['date']}.")
    console.print("From benchmarks/results/part16_speculation.json.")


if __name__ == "__main__":
    main()
