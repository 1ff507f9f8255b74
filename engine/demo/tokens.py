"""Shows the tokens of a text in colours. Part 20's wiring. Imports no torch."""

from collections.abc import Sequence
from itertools import cycle

from rich.text import Text

from engine.text.tokenizer import Tokenizer


def coloured(tokenizer: Tokenizer, token_ids: Sequence[int]) -> Text:
    """A text for `rich` with the tokens in alternating colours, each followed by its id."""
    text = Text()
    for token_id, colour in zip(token_ids, cycle(["cyan", "magenta", "yellow", "green"])):
        text.append(_printable(tokenizer.decode([token_id])), style=f"bold {colour}")
        text.append(f" {token_id}  ", style="dim")
    return text


def _printable(token: str) -> str:
    """The token with blanks as dots, and control characters and line ends as Python's escapes."""
    shown = ""
    for character in token:
        if character == " ":
            shown += "·"
        elif character.isprintable():
            shown += character
        else:
            shown += repr(character)[1:-1]  # without the quotation marks
    return shown
