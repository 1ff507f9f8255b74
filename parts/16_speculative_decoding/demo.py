"""Two models write one story: what the small one proposed, what stood, and who is done first.

python -m parts run 16
"""

import argparse
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console, Group
from rich.panel import Panel
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
from benchmarks.record import OUT, record  # noqa: E402
from engine.core.llm_engine import LLMEngine  # noqa: E402
from engine.decoding.params import SamplingParams  # noqa: E402
from parts.stage import side_by_side, title, yes  # noqa: E402

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

    title(console, "5. Side by side: whoever has taken less time so far takes the next step")
    figures["seconds"] = race(console, models, greedy)
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


@dataclass
class Stream:
    """An engine that continues REFRAIN, and the seconds that its steps have taken."""

    name: str
    models: Models
    engine: LLMEngine
    seen: list[Seen] | None = None  # what stood, in an engine that speculates
    clock: float = 0.0
    token_ids: list[int] = field(default_factory=list)

    def advance(self) -> bool:
        start = time.perf_counter()
        outputs = self.engine.step()
        self.clock += time.perf_counter() - start
        for output in outputs:
            self.token_ids = list(output.outputs[0].token_ids)
        return self.engine.has_unfinished_requests()

    def panel(self) -> Panel:
        if self.seen is None:
            text = Text(REFRAIN, style="dim") + Text(shown(self.models, self.token_ids), style=OWN)
        else:
            text = story(self.models, REFRAIN, self.seen)
        pace = f"{len(self.token_ids):3} tokens in {self.clock:.2f} s"
        return Panel(Group(text, Text(f"\n{pace}", style="bold")), title=self.name)


def race(console: Console, models: Models, params: SamplingParams) -> dict[str, float]:
    """Three engines continue the same text; the seconds of each."""
    streams = [
        Stream("no drafts", models, plain(models)),
        Stream("a model drafts", models, with_draft_model(models, Fixed(DRAFTS))),
        Stream("the text drafts", models, with_ngrams(models, Fixed(DRAFTS))),
    ]
    for stream in streams:
        tell(stream.engine, [REFRAIN], params)  # once, for what only the first request waits for
    for stream in streams[1:]:
        stream.seen = watch(stream.engine)
    for stream in streams:
        stream.engine.add_request("0", REFRAIN, params)
    side_by_side(console, streams, Stream.panel)
    same = len({tuple(stream.token_ids) for stream in streams}) == 1
    console.print(f"\nThe same text three times: [bold]{yes(same)}[/]")
    console.print("A clock ran for each engine's steps alone. What was measured in quiet is in the article.")
    return {stream.name: stream.clock for stream in streams}


if __name__ == "__main__":
    main()
