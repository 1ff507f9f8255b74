"""What Hugging Face's chat templates use beside Jinja's own: a tag, two functions and a filter. Part 14."""

import json
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from engine.decoding.template_sandbox import charge, to_text

# CPython writes at most so many characters for each one of a format, which may have widths ("%200Y").
STRFTIME_CHARACTERS = 256


class Generation(Extension):
    """The tag `{% generation %}`, which marks the model's words for training.

    Here it renders only its body.
    """

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)  # the name of the tag
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def raise_exception(message: object) -> NoReturn:
    """The template refuses the conversation. Raises TemplateError with the text of `message`."""
    raise TemplateError(to_text(message))


def strftime_now(format: str) -> str:
    """The current local time, written as `format` says (`datetime.strftime`)."""
    charge(STRFTIME_CHARACTERS * len(format))
    return datetime.now().strftime(format)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson` as in Hugging Face. Unlike Jinja's own filter, it does not escape for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
