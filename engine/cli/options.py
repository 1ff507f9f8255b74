"""Makes a flag from each field of `EngineArgs`, with the field's type, default and help. Part 20's wiring."""

import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field, fields
from functools import wraps
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import typer

from engine.models.checkpoint import CheckpointError
from engine.wiring.engine_args import EngineArgs, choices
from engine.wiring.extensions import is_here

CONNECTION_REFUSED = ("Connection refused", "All connection attempts failed")  # messages of urllib and httpx
# Typer reads these types. The flag of a field of any other type is read as text.
TYPER_TYPES = (bool, int, float, list[str])


@contextmanager
def refusals(command: str, *more: type[Exception]) -> Iterator[None]:
    """End the command with a one-line message and exit status 1 if the block raises CheckpointError,
    ValueError, or one of `more`.
    """
    refused: tuple[type[Exception], ...] = (CheckpointError, ValueError, *more)
    try:
        yield
    except refused as error:
        sys.exit(f"ruvon {command}: {error}")


def check_folder(flag: str, path: Path | None) -> None:
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


def takes_engine_args(name: str | None = None, /, **defaults: Any) -> Callable[[Callable], Callable]:
    """Decorate `command(args: EngineArgs, …)`. In place of `args`, the new command has a flag for each field
    of EngineArgs.

    `name` is the command's name in error messages, by default the function's. `defaults` replace defaults of
    fields. The command ends with exit status 1 if EngineArgs refuses the flags' values.
    """

    def decorate(command: Callable) -> Callable:
        flags = [_parameter(spec, defaults) for spec in fields(EngineArgs)]
        signature = inspect.signature(command)
        others = [parameter for parameter in signature.parameters.values() if parameter.name != "args"]
        # Arguments, which have no default, come first, because the help keeps this order.
        arguments = [parameter for parameter in others if parameter.default is parameter.empty]
        options = [parameter for parameter in others if parameter.default is not parameter.empty]

        @wraps(command)
        def from_flags(**flag_values: Any) -> None:
            with refusals(name or command.__name__):
                values = {spec.name: _value(spec, flag_values.pop(spec.name)) for spec in fields(EngineArgs)}
                args = EngineArgs(**values)
            command(args=args, **flag_values)

        parameters = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in (*arguments, *flags, *options)
        ]
        # Typer reads the signature from this attribute, which mypy does not know.
        from_flags.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        from_flags.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return from_flags

    return decorate


def _parameter(spec: Field, defaults: Mapping[str, Any]) -> inspect.Parameter:
    """The parameter from which typer makes the flag of this field. `defaults` replace defaults of fields."""
    default = defaults.get(spec.name, spec.default)
    kind = _flag_type(spec.type)
    flag = "--" + spec.name.replace("_", "-")
    # A flag that is off by default needs no --no-flag. A flag with the default None needs both forms.
    names = [flag] if kind is bool and spec.default is False else []
    literals = [str(choice) for choice in choices(spec.type) if choice is not None]
    help, example = spec.metadata["help"], spec.metadata["example"]
    settings = {"help": help, "rich_help_panel": spec.metadata["topic"]}  # arguments of typer.Option
    extension = spec.metadata["extension"]
    settings["hidden"] = extension is not None and not is_here(extension)  # it would be refused
    if kind is str and literals:
        settings["help"] = f"{'|'.join(literals)}: {help}"
    elif example:
        settings["help"] += f" For example: {example}"
    completions = [*literals, *spec.metadata["completions"]]
    if kind is str and completions:
        settings["autocompletion"] = _completion(completions)
    annotation: Any = Annotated[kind | None if default is None else kind, typer.Option(*names, **settings)]
    return inspect.Parameter(
        spec.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _completion(values: list[str]) -> Callable[[str], list[str]]:
    """A function that returns the values with a given beginning, for a shell's completion."""

    def complete(incomplete: str) -> list[str]:  # typer requires this parameter's name
        return [value for value in values if value.startswith(incomplete)]

    return complete


def _flag_type(declared: Any) -> type:
    """The type that typer reads from the command line for a field with the declared type."""
    members = get_args(declared) if get_origin(declared) in (Union, UnionType) else (declared,)
    first, *_ = [member for member in members if member is not NoneType]
    return first if first in TYPER_TYPES else str


def _value(spec: Field, flag_value: Any) -> Any:
    """The field's value from the flag's value. The flag of a field that is a mapping takes JSON. Raises
    ValueError if that flag's value is not JSON.
    """
    if flag_value is None or not _is_mapping(spec.type):
        return flag_value
    try:
        return json.loads(flag_value)
    except json.JSONDecodeError as error:
        raise ValueError(f"--{spec.name.replace('_', '-')}: not JSON: {error}") from None


def _is_mapping(declared: Any) -> bool:
    """Whether the declared type is a Mapping, or a union with one."""
    return any(get_origin(member) is Mapping for member in (declared, *get_args(declared)))
