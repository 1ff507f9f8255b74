"""Part 1's demo: text to tokens, through the model once, to the next word's probabilities, back to text.

    python -m parts run 1
    python -m parts run 1 -- "The dog chased the red" --model gpt2

Every step composes the engine's own pieces, in the order in which the article explains them.
"""

import argparse
import sys
import time
from itertools import cycle
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that the file also runs by its path

from benchmarks.record import OUT, ROOT, record
from engine.attention.dense import causal
from engine.models.checkpoint import CheckpointError
from engine.models.loader import load_model
from engine.text.tokenizer import Tokenizer

PROMPTS = ["Hello world", "Tim had a red ball. He loved his red"]
SHOWN = 8  # candidates per prompt
ROWS = 16  # of the table of guesses
BAR = 40  # characters of a bar for probability 1
console = Console(highlight=False)


def readable(tokenizer: Tokenizer, id: int) -> str:
    """A token's text, or its bytes where they are only part of a character."""
    text = tokenizer.decode([id])
    return f"<{tokenizer.token_bytes(id).hex(' ').upper()}>" if "\ufffd" in text else text


def show_tokens(tokenizer: Tokenizer, token_ids: list[int]) -> None:
    """Tokens in turning colours, a space drawn as a dot, and their ids under them."""
    pieces = [readable(tokenizer, id).replace(" ", "·").replace("\n", "↵") for id in token_ids]
    widths = [max(len(piece), len(str(id))) + 2 for piece, id in zip(pieces, token_ids, strict=True)]
    colours = cycle(["cyan", "magenta", "yellow", "green"])
    upper, lower = Text(), Text(style="dim")
    used = 4
    for piece, id, width, colour in zip(pieces, token_ids, widths, colours, strict=False):
        if used + width > console.width:
            console.print(Text("    ") + upper, Text("    ") + lower, sep="\n")
            upper, lower, used = Text(), Text(style="dim"), 4
        upper.append(piece.ljust(width), style=f"bold {colour}")
        lower.append(str(id).ljust(width))
        used += width
    console.print(Text("    ") + upper, Text("    ") + lower, sep="\n")


def show_guesses(tokenizer: Tokenizer, token_ids: list[int], probabilities: Tensor) -> None:
    """One pass guesses after *every* token; the text itself says which guesses were right."""
    table = Table("after", "the model expects", "", "and the text has", box=None, padding=(0, 3, 0, 0))
    chances, guesses = probabilities.max(dim=-1)  # [T], [T]
    rows = list(enumerate(zip(chances.tolist(), guesses.tolist(), strict=True)))
    for i, (chance, guess) in rows[-ROWS:]:
        actual = token_ids[i + 1] if i + 1 < len(token_ids) else None
        style = "bold green" if actual == guess else ""
        table.add_row(
            Text(repr(readable(tokenizer, token_ids[i]))),
            Text(repr(readable(tokenizer, guess)), style=style),
            f"{chance:.0%}",
            Text("?" if actual is None else repr(readable(tokenizer, actual)), style=style),
        )
    console.print(table)


def show_distribution(tokenizer: Tokenizer, probabilities: Tensor) -> list[list]:
    """The likeliest next tokens as bars; returns them as [text, probability]."""
    chances, ids = probabilities.topk(SHOWN)
    top = [
        [tokenizer.decode([id]), chance] for chance, id in zip(chances.tolist(), ids.tolist(), strict=True)
    ]
    for text, chance in top:
        bar = "█" * max(1, round(chance * BAR))
        line = Text(f"    {text!r:>14}  ")
        console.print(line.append(f"{bar:<{BAR}}", style="cyan").append(f"  {chance:6.1%}"))
    rest = 1 - sum(chance for _, chance in top)
    others = f"the other {probabilities.numel() - SHOWN:,}"
    console.print(f"    {others:>14}  {rest:>{BAR + 8}.1%}", style="dim")
    return top


def run_once(prompt: str, tokenizer: Tokenizer, model: nn.Module) -> dict:
    """One prompt through the whole road, told on the way; returns the figures."""
    console.rule(Text(f" {prompt} ", style="bold"))

    # 1. Text -> bytes -> tokens.
    start = time.perf_counter()
    token_ids = tokenizer.encode(prompt)
    encode_seconds = time.perf_counter() - start
    if not token_ids:
        raise ValueError("a prompt needs at least one token")
    T, V = len(token_ids), model.config.vocab_size
    console.print(f"\n[bold]1. Tokens[/]        {len(prompt.encode())} bytes become T = {T} tokens\n")
    show_tokens(tokenizer, token_ids)

    # 2. Tokens -> hidden[T, D] -> logits[T, V], in one pass over the whole prompt.
    start = time.perf_counter()
    hidden = model(torch.tensor(token_ids), torch.arange(T), causal)  # [T, D]
    logits = model.logits(hidden)  # [T, V]
    forward_seconds = time.perf_counter() - start
    probabilities = torch.softmax(logits, dim=-1)  # [T, V]
    console.print(
        f"\n[bold]2. One pass[/]      hidden {list(hidden.shape)} -> logits {list(logits.shape)}: "
        f"{V:,} scores after each token, in {forward_seconds * 1e3:.1f} ms\n"
    )
    show_guesses(tokenizer, token_ids, probabilities)

    # 3. The last row is about the word that is not there yet.
    console.print("\n[bold]3. What next?[/]    The last row, as probabilities\n")
    top = show_distribution(tokenizer, probabilities[-1])

    # 4. And back to text.
    text = tokenizer.decode([*token_ids, int(logits[-1].argmax())])
    console.print("\n[bold]4. Text again[/]    With the likeliest token at its end\n")
    console.print(Text(f"    {prompt}").append(text[len(prompt) :], style="bold green").append("\n"))
    return {
        "tokens": T,
        "encode_ms": encode_seconds * 1e3,
        "forward_ms": forward_seconds * 1e3,
        "top": top,
        "text": text,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="default: two that show the idea")
    parser.add_argument("--model", default="storyteller", help="an embedded name, a folder or a hub id")
    arguments = parser.parse_args()

    torch.set_num_threads(1)  # so small a model gains nothing from more
    start = time.perf_counter()
    try:
        tokenizer, model = Tokenizer.from_pretrained(arguments.model), load_model(arguments.model)
    except CheckpointError as error:
        parser.error(str(error))
    load_seconds = time.perf_counter() - start
    config = model.config
    parameters = sum(parameter.numel() for parameter in model.parameters())
    console.print(
        f"\n[bold]{arguments.model}[/]: L = {config.num_layers} layers, D = {config.hidden_size} wide, "
        f"V = {config.vocab_size:,} tokens, {parameters / 1e6:.1f} million parameters, "
        f"loaded in {load_seconds:.2f} s\n"
    )
    try:
        prompts = {prompt: run_once(prompt, tokenizer, model) for prompt in arguments.prompts or PROMPTS}
    except ValueError as error:  # not Unicode, or longer than the model can see
        parser.error(str(error))

    path = record(
        "part01",
        question="What comes after these prompts, and how long does one pass take?",
        workload={"model": arguments.model},
        figures={"load_seconds": load_seconds, "parameters": parameters, "prompts": prompts},
        folder=OUT,
    )
    console.print(
        f"[dim]Figures: {path.relative_to(ROOT)}. Next: articles/{Path(__file__).parent.name}.md[/]"
    )


if __name__ == "__main__":
    main()
