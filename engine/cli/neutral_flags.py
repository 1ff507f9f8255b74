"""vLLM's flags that do not exist here: accepted with a value that asks for nothing. Part 20's wiring."""

import inspect
import json
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Annotated, Any

import typer

from engine.cli.options import refusals, set_parameters, with_dashes
from engine.wiring.neutral_options import Neutral, json_or_text

HIDDEN = typer.Option(hidden=True)


def takes_neutral_flags(name: str, table: Mapping[str, Neutral]) -> Callable[[Callable], Callable]:
    """Decorate the command called `name`, so that it also takes the flags in `table`. The help does not show
    them, and their values do not reach the command. A value that is not accepted ends the command with exit
    status 1 and the reason.

    A flag that the command has itself stays the command's, even if it is in `table`.
    """

    def decorate(command: Callable) -> Callable:
        signature = inspect.signature(command)
        neutral_flags = {flag: entry for flag, entry in table.items() if flag not in signature.parameters}

        @wraps(command)
        def from_flags(**flag_values: Any) -> None:
            with refusals(name):
                for flag, entry in neutral_flags.items():
                    value = flag_values.pop(flag, None)
                    if value is not None:  # the flag was given
                        _check_flag(flag, value, entry)
            command(**flag_values)

        hidden = [_parameter(flag, entry) for flag, entry in neutral_flags.items()]
        set_parameters(from_flags, [*signature.parameters.values(), *hidden])
        return from_flags

    return decorate


def _parameter(flag: str, entry: Neutral) -> inspect.Parameter:
    """The parameter from which typer makes a hidden flag; its value is None if the flag is not given."""
    value_type: Any = bool if entry.is_switch else str
    annotation = Annotated[value_type | None, HIDDEN]
    return inspect.Parameter(flag, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _check_flag(flag: str, given: bool | str, entry: Neutral) -> None:
    """Raise ValueError if the value is not accepted. `given` is a bool for a switch, else a text."""
    name = with_dashes(flag)
    if isinstance(given, bool):
        value: Any = given
        as_given = f"--{name}" if given else f"--no-{name}"
    else:
        value = json_or_text(given)
        as_given = f"--{name} {given}"
    if entry.accepts(value):
        return
    if entry.is_switch or entry.values == (None,):  # there is no other value to suggest
        raise ValueError(f"{as_given} is not accepted: {entry.reason}")
    accepted = [known if isinstance(known, str) else json.dumps(known) for known in entry.values]
    raise ValueError(f"{as_given}: {', '.join(accepted)} is accepted: {entry.reason}")
