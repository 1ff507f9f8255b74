"""Makes a flag from each field of `EngineArgs`, with the field's type, default and help. Part 20's wiring."""

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import Field, fields
from decimal import Decimal
from functools import wraps
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import typer
from typer.core import TyperCommand

from engine.models.checkpoint import CheckpointError
from engine.wiring.engine_args import EngineArgs, choices
from engine.wiring.extensions import is_here
from engine.wiring.neutral_options import NEUTRAL

CONNECTION_REFUSED = ("Connection refused", "All connection attempts failed")  # messages of urllib and httpx
# Typer reads these types. The flag of a field of any other type is read as text.
TYPER_TYPES = (bool, int, float, list[str])
SHORT_NAMES = {"tensor_parallel_size": "-tp", "quantization": "-q", "speculative_config": "-sc"}  # vLLM's
FACTORS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}  # the letter behind a number -> its factor
FACTORS |= {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
MODEL_ARGUMENT = "model_tag"  # vLLM's name of the argument MODEL
_HIDDEN = typer.Option(hidden=True)
ONE_MODEL = "one MODEL is accepted; a text with blanks needs quotation marks"


def with_dashes(name: str) -> str:
    """The name of a flag as the help has it. vLLM takes --max_model_len and --max-model-len, and so do we."""
    return name.replace("_", "-")


def whole_number(text: str | int) -> int:
    """The number that a flag's text means, by vLLM's rule: 1k is 1,000 and 1K is 1,024; so for m, g and t.
    Decimals such as 1.5k are accepted before a small letter. Raises typer.BadParameter for another text.
    """
    number = re.fullmatch(r"([+-]?\d+)(\.\d+)?([kKmMgGtT])?", str(text).strip())
    if number:
        digits, decimals, letter = number.groups()
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
        multiple_options = {name for param in self.params if param.multiple for name in param.opts}
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
    of EngineArgs, and an argument MODEL, which means the same as the flag --model. vLLM's flags that are no
    fields are accepted with a value that asks for nothing (`NEUTRAL`).

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
            model = flag_values.pop(MODEL_ARGUMENT, None)
            with refusals(name or command.__name__):
                values = {spec.name: _value(spec, flag_values.pop(spec.name)) for spec in fields(EngineArgs)}
                values["model"] = _model(values["model"], model)
                args = EngineArgs(**values)
            command(args=args, **flag_values)

        parameters = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in (_model_argument(bool(arguments)), *arguments, *flags, *options)
        ]
        set_parameters(from_flags, signature, parameters)
        return takes_neutral_flags(name or command.__name__, NEUTRAL)(from_flags)

    return decorate


def set_parameters(
    command: Callable, signature: inspect.Signature, parameters: Sequence[inspect.Parameter]
) -> None:
    """Give `command` the signature, with these parameters in place of its own. Typer makes a flag of each."""
    # Typer reads both attributes. mypy does not know that a function's signature can be set.
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


def takes_neutral_flags(
    name: str, table: Mapping[str, tuple[tuple[Any, ...], str]]
) -> Callable[[Callable], Callable]:
    """Decorate a command: vLLM's flags in `table` are accepted with a value that asks for nothing, and do not
    reach the command. Another value ends the command with exit status 1 and the reason.

    `name` is the command's. `table` has the accepted values of each flag, the first of them vLLM's default,
    and the reason why no others are. The help does not show these flags. A flag that the command has itself
    is the command's.
    """

    def decorate(command: Callable) -> Callable:
        signature = inspect.signature(command)
        neutral = {flag: values for flag, values in table.items() if flag not in signature.parameters}

        @wraps(command)
        def from_flags(**flag_values: Any) -> None:
            with refusals(name):
                for flag in neutral:
                    _refuse_unless_neutral(flag, flag_values.pop(flag, None), *neutral[flag])
            command(**flag_values)

        hidden = []
        for flag, (values, _) in neutral.items():
            value_type: Any = bool | None if _is_switch(values) else str | None
            annotation = Annotated[value_type, _HIDDEN]
            kind = inspect.Parameter.KEYWORD_ONLY
            hidden.append(inspect.Parameter(flag, kind, default=None, annotation=annotation))
        set_parameters(from_flags, signature, [*signature.parameters.values(), *hidden])
        return from_flags

    return decorate


def _is_switch(values: Sequence[Any]) -> bool:
    """Whether a flag with these values is written --name or --no-name."""
    return any(isinstance(value, bool) for value in values)


def _refuse_unless_neutral(flag: str, given: Any, accepted: tuple[Any, ...], reason: str) -> None:
    """Raise ValueError if a flag was given with a value that is not accepted. `given` is None if the flag was
    not given, a bool for a switch, and else the text of the value.
    """
    if given is None:
        return
    value = given
    if isinstance(given, str):
        with suppress(json.JSONDecodeError):  # a text that is no JSON means itself
            value = json.loads(given)
    # Types are compared, too, because False == 0 in Python.
    if any(type(value) is type(neutral) and value == neutral for neutral in accepted):
        return
    flag = with_dashes(flag)
    if isinstance(given, bool):
        flag_as_given = f"--{flag}" if given else f"--no-{flag}"
    else:
        flag_as_given = f"--{flag} {given}"
    if _is_switch(accepted) or accepted == (None,):
        raise ValueError(f"{flag_as_given} is not accepted: {reason}")
    values = [neutral if isinstance(neutral, str) else json.dumps(neutral) for neutral in accepted]
    raise ValueError(f"{flag_as_given}: {', '.join(values)} is accepted: {reason}")


def _model_argument(is_first: bool) -> inspect.Parameter:
    """The parameter from which typer makes the argument MODEL. `is_first`: another argument follows.

    Typer gives the last argument of `ruvon generate [MODEL] PROMPT` to PROMPT only if MODEL takes any number
    of values; `_model` refuses more than one.
    """
    setting = typer.Argument(metavar="MODEL", help="The same as --model.", show_default=False)
    value_type: Any = list[str] if is_first else str
    annotation = Annotated[value_type | None, setting]
    return inspect.Parameter(
        MODEL_ARGUMENT, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def _model(flag_value: str | None, argument: str | Sequence[str] | None) -> Any:
    """The model, from the flag --model and from the argument MODEL; by default the field's default. Raises
    ValueError for two models.
    """
    models = [argument] if isinstance(argument, str) else list(argument or ())
    if len(models) > 1:
        raise ValueError(f"{' '.join(models)}: {ONE_MODEL}")
    if models and flag_value not in (None, *models):
        raise ValueError(f"MODEL {models[0]} and --model {flag_value}: one of them is accepted")
    if models:
        return models[0]
    return EngineArgs.model if flag_value is None else flag_value


def _parameter(spec: Field, defaults: Mapping[str, Any]) -> inspect.Parameter:
    """The parameter from which typer makes the flag of this field. `defaults` replace defaults of fields."""
    default = defaults.get(spec.name, spec.default)
    value_type = _flag_type(spec.type)
    flag = "--" + with_dashes(spec.name)
    names = []  # none: typer makes --flag, and for a bool --no-flag as well
    if value_type is bool and spec.default is False:
        names = [flag]  # a flag that is off by default needs no --no-flag; one with the default None does
    if spec.name in SHORT_NAMES:
        names = [flag, SHORT_NAMES[spec.name]]
    literals = [str(choice) for choice in choices(spec.type) if choice is not None]
    help, example = spec.metadata["help"], spec.metadata["example"]
    settings = {"help": help, "rich_help_panel": spec.metadata["topic"]}  # arguments of typer.Option
    extension = spec.metadata["extension"]
    settings["hidden"] = extension is not None and not is_here(extension)  # EngineArgs would refuse the flag
    if value_type is str and literals:
        settings["help"] = f"{'|'.join(literals)}: {help}"
    elif example:
        settings["help"] += f" For example: {example}"
    if spec.name == "model":
        # With the default None, `_model` sees whether --model was given beside MODEL.
        settings["show_default"], default = str(default), None
    if value_type is int:
        settings |= {"parser": whole_number, "metavar": "INTEGER"}
    completions = [*literals, *spec.metadata["completions"]]
    if value_type is str and completions:
        settings["autocompletion"] = _completion(completions)
    option = typer.Option(*names, **settings)
    annotation: Any = Annotated[value_type | None if default is None else value_type, option]
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
    is_union = get_origin(declared) in (Union, UnionType)
    members = get_args(declared) if is_union else (declared,)
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
        raise ValueError(f"--{with_dashes(spec.name)}: not JSON: {error}") from None


def _is_mapping(declared: Any) -> bool:
    """Whether the declared type is a Mapping, or a union with one."""
    return any(get_origin(member) is Mapping for member in (declared, *get_args(declared)))
