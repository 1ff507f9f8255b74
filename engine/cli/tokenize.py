"""`ruvon tokenize`: shows the tokens of a text. Part 20's wiring. Imports no torch."""

import json
import sys
from typing import Annotated

import typer
from rich.console import Console

from engine.cli.options import refusals
from engine.client.untrusted import for_stdout
from engine.demo.tokens import coloured
from engine.text.tokenizer import Tokenizer


def tokenize(
    text: Annotated[str | None, typer.Argument(help="The text; default: what comes through a pipe.")] = None,
    model: Annotated[
        str, typer.Option(help="The tokenizer's model: embedded, a folder, or a hub id.")
    ] = "storyteller",
    ids: Annotated[bool, typer.Option("--ids", help="Print only the ids, as JSON.")] = False,
    decode: Annotated[bool, typer.Option("--decode", help="TEXT is ids as JSON; print their text.")] = False,
) -> None:
    """Show TEXT's tokens and their ids."""
    with refusals("tokenize"):
        tokenizer = Tokenizer.from_pretrained(model)
        text = sys.stdin.read() if text is None else text
        if decode:
            print(for_stdout(tokenizer.decode(_read_ids(text))))
            return
        token_ids = tokenizer.encode(text)
    if ids:
        print(json.dumps(token_ids))
        return
    Console(highlight=False).print(coloured(tokenizer, token_ids))
    average = f", {len(text) / len(token_ids):.1f} characters a token" if token_ids else ""
    print(f"{len(token_ids)} tokens, {len(text)} characters{average}", file=sys.stderr)


def _read_ids(text: str) -> list[int]:
    """The token ids in a JSON list. Raises ValueError if `text` is not such a list."""
    try:
        token_ids = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON: {error}") from None
    if not isinstance(token_ids, list) or not all(type(token_id) is int for token_id in token_ids):
        raise ValueError("a JSON list of token ids is accepted")
    return token_ids
