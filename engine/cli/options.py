"""What all commands of `ruvon` share: how flags are read, and how a command refuses them. Part 20's wiring.

engine_flags.py makes the flags of an engine's options, serve_flags.py those of a server's, and
neutral_flags.py those of vLLM's that do not exist here.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from engine.models.checkpoint import CheckpointError

CONNECTION_REFUSED = ("Connection refused", "All connection attempts failed")  # messages of urllib and httpx
# The letter behind a number -> its factor.
DECIMAL_FACTORS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
FACTORS = DECIMAL_FACTORS | {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def with_dashes(name: str) -> str:
    """The name of a flag as the help has it. vLLM takes --max_model_len and --max-model-len, and so do we."""
    return name.replace("_", "-")


def flag(topic: str, help: str, *names: str, **settings: Any) -> Any:
    """The typer option of a flag, shown in the help under the heading `topic`. `names` replace the name that
    typer makes of the parameter; `settings` are typer.Option's.
    """
    return typer.Option(*names, help=help, rich_help_panel=topic, **settings)


def whole_number(text: str | int) -> int:
    """The number that a flag's text means, by vLLM's rule: 1k is 1,000 and 1K is 1,024; so for m, g and t.
    Before a small letter the number may have decimals, and what is left behind the point is cut off. Raises
    typer.BadParameter for another text.
    """
    match = re.fullmatch(r"([+-]?\d+)(\.\d+)?([kKmMgGtT])?", str(text).strip())
    if match:
        digits, decimals, letter = match.groups()
        if decimals is None:
            return int(digits) * FACTORS.get(letter, 1)
        if letter in DECIMAL_FACTORS:
            return int(Decimal(digits + decimals) * DECIMAL_FACTORS[letter])
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
        return super().parse_args(ctx, _one_value_each(args, multiple_options))


def _one_value_each(args: list[str], multiple_options: set[str]) -> list[str]:
    """The arguments with the option's name also before the second value of one of `multiple_options`, and
    before each further one.
    """
    expanded: list[str] = []
    option = ""  # the last option, if it takes several values
    num_values = 0  # of this option so far
    for i, argument in enumerate(args):
        if argument == "--":  # what follows are arguments, even with a dash before them
            return expanded + args[i:]
        if argument.startswith("-"):
            option = argument if with_dashes(argument) in multiple_options else ""
            num_values = 0
        elif option:
            num_values += 1
            if num_values > 1:
                expanded.append(option)
        expanded.append(argument)
    return expanded


@contextmanager
def refusals(command: str, *more_errors: type[Exception]) -> Iterator[None]:
    """End the command with exit status 1 and a message on stderr if the block raises CheckpointError,
    ValueError, or one of `more_errors`.
    """
    refused: tuple[type[Exception], ...] = (CheckpointError, ValueError, *more_errors)
    try:
        yield
    except refused as error:
        sys.exit(f"ruvon {command}: {error}")


def check_output_file(name: str, path: Path | None) -> None:
    """Raise ValueError if `path` is a folder, or lies in a folder that does not exist. `name` is the flag's.
    Commands call this before they measure, so that no result is lost at the end.
    """
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ValueError(f"{name} {path}: a file in a folder that is there is accepted")


def with_hint(message: str) -> str:
    """The message of a failed request. If no server listens, the message also names the command that starts
    one.
    """
    if any(words in message for words in CONNECTION_REFUSED):
        message += "; ruvon serve starts a server"
    return message


def set_parameters(command: Callable, parameters: Sequence[inspect.Parameter]) -> None:
    """Give `command` these parameters in place of its own. Typer makes a flag or an argument of each."""
    # Typer reads both attributes. mypy does not know that a function's signature can be set.
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
