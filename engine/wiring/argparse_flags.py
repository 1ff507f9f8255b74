"""Makes a flag of an `argparse` parser from each engine option, for scripts written for vLLM. Part 20.

`ruvon`'s own flags come from the same fields (engine/cli/options.py).
"""

import argparse
import json
from collections.abc import Iterable, Mapping
from dataclasses import Field
from typing import Any, get_args, get_origin

from engine.wiring.engine_args import choices
from engine.wiring.extensions import is_here
from engine.wiring.neutral_options import NEUTRAL


def add_flags(parser: argparse.ArgumentParser, specs: Iterable[Field]) -> argparse.ArgumentParser:
    """Add to `parser` a flag for each of these fields of EngineArgs, and a flag without help for each option
    in NEUTRAL. Returns `parser`.
    """
    for spec in specs:
        help, extension = spec.metadata["help"].replace("%", "%%"), spec.metadata["extension"]
        if extension is not None and not is_here(extension):
            help = argparse.SUPPRESS
        parser.add_argument(_flag(spec.name), default=spec.default, help=help, **_reader(spec.type))
    for name, (values, _) in NEUTRAL.items():
        reader = _reader(bool) if isinstance(values[0], bool) else {"type": _value}
        parser.add_argument(_flag(name), default=values[0], help=argparse.SUPPRESS, **reader)
    return parser


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _reader(kind: Any) -> dict[str, Any]:
    """The arguments of `add_argument` that read a value of this type."""
    members = get_args(kind) or (kind,)
    if bool in members:
        return {"action": argparse.BooleanOptionalAction}
    if any(get_origin(member) is Mapping for member in members):
        return {"type": json.loads}
    if literals := [choice for choice in choices(kind) if choice is not None]:
        return {"choices": literals}
    return {"type": next((number for number in (int, float) if number in members), str)}


def _value(text: str) -> Any:
    """The value that a neutral option's text stands for: JSON (1, null, {}), else the text itself."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
