"""What all commands of `ruvon` share: how flags are read, and how a command refuses them. Part 20's wiring.

engine_flags.py makes the flags of an engine's options, and serve_flags.py those of a server's.
"""

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from decimal import Decimal
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from engine.models.checkpoint import CheckpointError
from engine.wiring.neutral_options import Neutral

CONNECTION_REFUSED = ("Connection refused", "All connection attempts failed")  # messages of urllib and httpx
FACTORS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}  # the letter behind a number -> its factor
FACTORS |= {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
HIDDEN = typer.Option(hidden=True)


def with_dashes(name: str) -> str:
    """The name of a flag as the help has it. vLLM takes --max_model_len and --max-model-len, and so do we."""
    return name.replace("_", "-")


def whole_number(text: str | int) -> int:
    """The number that a flag's text means, by vLLM's rule: 1k is 1,000 and 1K is 1,024; so for m, g and t.
    Decimals such as 1.5k are accepted before a small letter. Raises typer.BadParameter for another text.
    """
    match = re.fullmatch(r"([+-]?\d+)(\.\d+)?([kKmMgGtT])?", str(text).strip())
    if match:
        digits, decimals, letter = match.groups()
        if decimals is None:
            return int(digits) * FACTORS.get(letter, 1)
        if letter and letter.islower():
            return int(Decimal(digits + decimals) * FACTORS[letter])
    raise typer.BadParameter(f"{text!r}: a whole number is accepted, or such as 2K (2,048) and 1.5k (1,500)")


class Command(TyperCommand):
    """A command with vLLM's way to give several values to an option: `--lora-modules a=b c=d`.

    An option that may be given several times also takes several values at once: all arguments up to the next
    option.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse `args`, in which `--name a b` means `--name a --name b`."""
        multiple_options: set[str] = set()
        for param in self.params:
            if param.multiple:
                multiple_options.update(param.opts)
        expanded: list[str] = []
        option = None  # the last option, if it takes several values
        for i, argument in enumerate(args):
            if argument == "--":  # what follows are arguments, even with a dash before them
                expanded += args[i:]
                break
            if argument.startswith("-"):
                option = argument if with_dashes(argument) in multiple_options else None
            elif option and args[i - 1] != option:  # a second or later value
                expanded.append(option)
            expanded.append(argument)
        return super().parse_args(ctx, expanded)


@contextmanager
def refusals(command: str, *more_errors: type[Exception], status: int = 1) -> Iterator[None]:
    """End the command with a message on stderr and this exit status if the block raises CheckpointError,
    ValueError, or one of `more_errors`.
    """
    refused: tuple[type[Exception], ...] = (CheckpointError, ValueError, *more_errors)
    try:
        yield
    except refused as error:
        if status == 1:  # an exit with a text prints it, and has this status
            sys.exit(f"ruvon {command}: {error}")
        print(f"ruvon {command}: {error}", file=sys.stderr)
        sys.exit(status)


def check_output_file(flag: str, path: Path | None) -> None:
    """Raise ValueError if `path` is a folder, or lies in a folder that does not exist. Commands call this
    before they measure, so that no result is lost at the end.
    """
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ValueError(f"{flag} {path}: a file in a folder that is there is accepted")


def with_hint(message: str) -> str:
    """The message of a failed request. If no server listens, the message also names the command that starts
    one.
    """
    if any(words in message for words in CONNECTION_REFUSED):
        message += "; ruvon serve starts a server"
    return message


def set_parameters(
    command: Callable, signature: inspect.Signature, parameters: Sequence[inspect.Parameter]
) -> None:
    """Give `command` the signature, with these parameters in place of its own. Typer makes a flag of each."""
    # Typer reads both attributes. mypy does not know that a function's signature can be set.
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


def takes_neutral_flags(name: str, table: Mapping[str, Neutral]) -> Callable[[Callable], Callable]:
    """Decorate the command called `name`: vLLM's flags in `table` are accepted with a value that asks for
    nothing, and do not reach the command. Another value ends the command with exit status 1 and the reason.

    The help does not show these flags. A flag that the command has itself is the command's.
    """

    def decorate(command: Callable) -> Callable:
        signature = inspect.signature(command)
        neutral = {flag: entry for flag, entry in table.items() if flag not in signature.parameters}

        @wraps(command)
        def from_flags(**flag_values: Any) -> None:
            with refusals(name):
                for flag, entry in neutral.items():
                    _refuse_unless_neutral(flag, flag_values.pop(flag, None), entry)
            command(**flag_values)

        hidden = []
        for flag, entry in neutral.items():
            value_type: Any = bool | None if entry.is_switch else str | None
            annotation = Annotated[value_type, HIDDEN]
            kind = inspect.Parameter.KEYWORD_ONLY
            hidden.append(inspect.Parameter(flag, kind, default=None, annotation=annotation))
        set_parameters(from_flags, signature, [*signature.parameters.values(), *hidden])
        return from_flags

    return decorate


def _refuse_unless_neutral(flag: str, flag_value: Any, entry: Neutral) -> None:
    """Raise ValueError if a flag was given with a value that is not accepted. `flag_value` is None if the
    flag was not given, a bool for a switch, and else the text of the value.
    """
    if flag_value is None:
        return
    value = flag_value
    if isinstance(flag_value, str):
        with suppress(json.JSONDecodeError):  # a text that is no JSON means itself
            value = json.loads(flag_value)
    # Types are compared, too, because False == 0 in Python.
    if any(type(value) is type(neutral) and value == neutral for neutral in entry.values):
        return
    flag = with_dashes(flag)
    if isinstance(flag_value, bool):
        flag_as_given = f"--{flag}" if flag_value else f"--no-{flag}"
    else:
        flag_as_given = f"--{flag} {flag_value}"
    if entry.is_switch or entry.values == (None,):
        raise ValueError(f"{flag_as_given} is not accepted: {entry.reason}")
    values = [neutral if isinstance(neutral, str) else json.dumps(neutral) for neutral in entry.values]
    raise ValueError(f"{flag_as_given}: {', '.join(values)} is accepted: {entry.reason}")
