"""Makes a flag of an `argparse` parser from each engine option, for scripts written for vLLM. Part 20.

`ruvon`'s own flags come from the same fields (engine/cli/engine_flags.py).
"""

import argparse
import json
from collections.abc import Iterable
from dataclasses import Field
from typing import Any

from engine.wiring.engine_args import choices, takes_mapping, union_members
from engine.wiring.extensions import is_here
from engine.wiring.neutral_options import NEUTRAL, json_or_text


def add_flags(parser: argparse.ArgumentParser, fields: Iterable[Field]) -> argparse.ArgumentParser:
    """Add to `parser` a flag for each of these fields of EngineArgs, and a flag without help for each option
    in NEUTRAL. Returns `parser`.
    """
    for field in fields:
        help_text, extension = field.metadata["help"], field.metadata["extension"]
        help_text = help_text.replace("%", "%%")  # argparse would read a single % as the start of a format
        if extension is not None and not is_here(extension):
            help_text = argparse.SUPPRESS
        settings = _argument_settings(field.type)
        parser.add_argument(_flag(field.name), default=field.default, help=help_text, **settings)
    for name, neutral in NEUTRAL.items():
        settings = _argument_settings(bool) if neutral.is_switch else {"type": json_or_text}
        parser.add_argument(_flag(name), default=neutral.values[0], help=argparse.SUPPRESS, **settings)
    return parser


def _flag(name: str) -> str:
    """The flag of an option: --max-loras for max_loras."""
    return "--" + name.replace("_", "-")


def _argument_settings(kind: Any) -> dict[str, Any]:
    """The arguments of `add_argument` with which argparse reads a value of the type `kind`."""
    members = union_members(kind)
    if bool in members:
        return {"action": argparse.BooleanOptionalAction}
    if takes_mapping(kind):
        return {"type": json.loads}
    literals = [choice for choice in choices(kind) if choice is not None]
    if literals:
        return {"choices": literals}
    for number in (int, float):
        if number in members:
            return {"type": number}
    return {"type": str}
