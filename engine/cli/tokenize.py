"""`ruvon tokenize`: a text as a model reads it. Part 20's wiring. Imports no torch."""

import json
import sys
from itertools import cycle
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from engine.cli.options import refusals
from engine.outside import for_stdout
from engine.tokenizer import Tokenizer


def tokenize(
    text: Annotated[str | None, typer.Argument(help="The text; default: what comes through a pipe.")] = None,
    model: Annotated[
        str, typer.Option(help="Whose tokenizer: embedded, a folder, or a hub id.")
    ] = "storyteller",
    ids: Annotated[bool, typer.Option("--ids", help="The ids alone, as JSON.")] = False,
    decode: Annotated[bool, typer.Option("--decode", help="TEXT is such a JSON; print its text.")] = False,
) -> None:
    """Show TEXT's tokens and their ids."""
    with refusals("tokenize"):
        tokenizer = Tokenizer.from_pretrained(model)
        given = sys.stdin.read() if text is None else text
        if decode:
            print(for_stdout(tokenizer.decode(_ids(given))))
            return
        found = tokenizer.encode(given)
    if ids:
        print(json.dumps(found))
        return
    Console(highlight=False).print(coloured(tokenizer, found))
    each = f", {len(given) / len(found):.1f} characters a token" if found else ""
    print(f"{len(found)} tokens, {len(given)} characters{each}", file=sys.stderr)


def coloured(tokenizer: Tokenizer, ids: list[int]) -> Text:
    """Tokens in alternating colours, each followed by its id."""
    text = Text()
    for token_id, colour in zip(ids, cycle(["cyan", "magenta", "yellow", "green"])):
        text.append(_shown(tokenizer.decode([token_id])), style=f"bold {colour}")
        text.append(f" {token_id}  ", style="dim")
    return text


def _shown(token: str) -> str:
    """A blank as a dot; what commands a terminal, or ends a line, as Python writes it."""
    return "".join("·" if c == " " else c if c.isprintable() else repr(c)[1:-1] for c in token)


def _ids(text: str) -> list[int]:
    """Raises ValueError."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON: {error}") from None
    if not isinstance(found, list) or not all(isinstance(id, int) for id in found):
        raise ValueError("a JSON list of token ids is accepted")
    return found
