"""A text coloured by what surprises the model, its perplexity, and a story with its second thoughts.

python -m parts run 10 [-- --text "One day, the moon fell into the soup." --seed 2]
"""

import argparse
import math
import sys
from dataclasses import asdict
from html import escape
from pathlib import Path

import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.part10_surprise import (  # noqa: E402
    FULL,
    INSTEAD,
    MODEL,
    STORY,
    TEXTS,
    Token,
    as_tokens,
    colour,
    make_engine,
    perplexity_of,
    run,
    scored,
)
from benchmarks.record import OUT, record  # noqa: E402
from engine.core.llm_engine import LLMEngine  # noqa: E402
from engine.decoding.params import SamplingParams  # noqa: E402
from parts.stage import title  # noqa: E402

PROMPT = "One day, Lily opened the box and found a"
SHOWN = 5  # of a text's most surprising tokens
TORN = 1.5  # the second choice is nearly the first: at most this many times less likely


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", default=STORY, help="what is scored")
    parser.add_argument("--prompt", default=PROMPT, help="what the model continues in the last section")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # a second one makes a model this small slower: part03_kv_cache
    console = Console(highlight=False)
    engine = make_engine()
    try:
        tokens = scored(engine, arguments.text)
        if len(tokens) < 2:
            raise ValueError("--text has one token: its first is never scored, so at least two are needed")
        story_params = SamplingParams(max_tokens=60, seed=arguments.seed, logprobs=INSTEAD)
        engine.make_requests("check", arguments.prompt, story_params)
    except ValueError as error:  # ParameterError among them
        sys.exit(f"demo: {error}")

    title(console, "1. A text, coloured by surprise")
    console.print(coloured(tokens), scale())
    console.print(f"\nIts {SHOWN} most surprising tokens, and what the model had expected there:\n")
    console.print(most_surprising(tokens))

    title(console, "2. One number for a text: perplexity")
    found = {name: scored(engine, text) for name, text in TEXTS.items()}
    if arguments.text != STORY:
        found = {"your text": tokens} | found
    console.print(perplexities(found))
    console.print("\nPerplexity 10: on average as unsure as among 10 tokens that are equally likely.")

    title(console, "3. While it writes: where was it torn?")
    written, same = tell(console, engine, arguments.prompt, story_params)
    torn = [(i, token) for i, token in enumerate(written) if is_torn(token)]
    console.print(
        f"\n{len(torn)} of {len(written)} tokens (underlined) had a rival at most {TORN} times less likely.\n"
    )
    console.print(rivals([token for _, token in torn][:SHOWN]))
    console.print(f"\nThe same tokens as without logprobs: [bold]{'yes' if same else 'NO'}[/]")

    OUT.mkdir(parents=True, exist_ok=True)
    page = OUT / "part10_surprise.html"
    page.write_text(as_page(tokens), encoding="utf-8")
    figures = {
        "perplexity": {name: perplexity_of(some) for name, some in found.items()},
        "text": [asdict(token) for token in tokens],
        "torn": [i for i, _ in torn],
        "same_tokens": same,
    }
    workload = {"model": MODEL, "text": arguments.text, "prompt": arguments.prompt, "seed": arguments.seed}
    path = record("part10", "What surprises the model?", workload, figures, folder=OUT)
    console.print(
        f"\n[dim]The coloured text as a page, with the rivals under the pointer: {page.relative_to(ROOT)}"
    )
    console.print(f"[dim]Figures saved in {path.relative_to(ROOT)}")


def as_page(tokens: list[Token]) -> str:
    """An HTML page of the text, each token on its colour. Under the pointer: its surprise, its rank, and what
    the model had expected.
    """
    spans = []
    for token in tokens:
        words = "nothing before it, no probability"
        if token.bits is not None:
            rivals = ", ".join(f"{text!r} {p:.0%}" for text, p in token.expected)
            words = f"{token.bits:.1f} bits, rank {token.rank}; expected {rivals}"
        style = f"background:{colour(token.bits)}"
        spans.append(f'<span style="{style}" title="{escape(words)}">{escape(token.text)}</span>')
    return (
        '<!doctype html><meta charset="utf-8"><title>What surprises the model?</title>'
        "<style>body{font:20px/1.9 monospace;max-width:44em;margin:3em auto;padding:0 1em;color:#111}"
        "span{white-space:pre-wrap}</style>"
        f"<p>{''.join(spans)}</p><p><small>Point at a word.</small></p>\n"
    )


def coloured(tokens: list[Token]) -> Text:
    text = Text()
    for token in tokens:
        torn = " underline" if is_torn(token) else ""
        text.append(token.text, f"black on {colour(token.bits)}{torn}")
    return text


def scale() -> Text:
    """What the colours mean."""
    text = Text("\nbits of surprise: ", style="dim")
    for bits in range(0, int(FULL) + 1, 2):
        text.append(f" {bits} ", f"black on {colour(bits)}")
    return text.append(" first ", f"black on {colour(None)}")


def most_surprising(tokens: list[Token]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column, justify in (("token", "left"), ("bits", "right"), ("chance", "right"), ("rank", "right")):
        table.add_column(column, justify=justify, no_wrap=True)
    table.add_column("expected", no_wrap=True, overflow="ellipsis")
    for token in sorted(tokens[1:], key=lambda token: -token.bits)[:SHOWN]:
        chance = f"1 in {math.exp(-token.logprob):,.0f}"
        table.add_row(shown(token.text), f"{token.bits:.1f}", chance, f"{token.rank:,}", expected(token))
    return table


def perplexities(found: dict[str, list[Token]]) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False)
    table.add_column("text")
    for column in ("tokens", "bits per token", "perplexity"):
        table.add_column(column, justify="right")
    for name, tokens in found.items():
        number = perplexity_of(tokens)
        table.add_row(name, str(len(tokens)), f"{math.log2(number):.2f}", f"{number:,.1f}")
    return table


def tell(
    console: Console, engine: LLMEngine, prompt: str, params: SamplingParams
) -> tuple[list[Token], bool]:
    """Writes a story on the screen, each token coloured as it comes; whether asking changed it."""
    tokenizer = engine.tokenizer
    engine.add_request("story", prompt, params)
    tokens: list[Token] = []
    with Live(console=console, refresh_per_second=12) as live:
        while engine.has_unfinished_requests():
            (output,) = engine.step()
            (sample,) = output.outputs
            new = range(len(tokens), len(sample.token_ids))
            tokens += as_tokens(
                tokenizer, [sample.token_ids[i] for i in new], [sample.logprobs[i] for i in new]
            )
            live.update(Text.assemble((prompt, "bold"), coloured(tokens)))
    quiet = SamplingParams(max_tokens=params.max_tokens, seed=params.seed)
    same = list(run(engine, prompt, quiet).outputs[0].token_ids) == list(sample.token_ids)
    return tokens, same


def is_torn(token: Token) -> bool:
    """Whether the two likeliest were nearly equal."""
    return len(token.expected) > 1 and token.expected[0][1] <= TORN * token.expected[1][1]


def rivals(tokens: list[Token]) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False)
    for column in ("it wrote", "and had in mind"):
        table.add_column(column, no_wrap=True, overflow="ellipsis")
    for token in tokens:
        table.add_row(shown(token.text), expected(token))
    return table


def expected(token: Token) -> Text:
    return Text("  ".join(f"{text!r} {p:.0%}" for text, p in token.expected))


def shown(text: str) -> Text:
    return Text(repr(text), style="bold")


if __name__ == "__main__":
    main()
