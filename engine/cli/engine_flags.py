"""Makes a flag from each field of `EngineArgs`, with the field's type, default and help. Part 20's wiring."""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields
from functools import wraps
from types import NoneType
from typing import Annotated, Any

import typer

from engine.cli.neutral_flags import takes_neutral_flags
from engine.cli.options import refusals, set_parameters, whole_number, with_dashes
from engine.wiring.engine_args import EngineArgs, choices, takes_mapping, union_members
from engine.wiring.extensions import is_here
from engine.wiring.neutral_options import NEUTRAL

# Typer reads these types. The flag of a field of any other type is read as text.
TYPER_TYPES = (bool, int, float)
SHORT_NAMES = {"tensor_parallel_size": "-tp", "quantization": "-q", "speculative_config": "-sc"}  # vLLM's
MODEL_ARGUMENT = "model_tag"  # vLLM's name of the argument MODEL
ONE_MODEL = "one MODEL is accepted; a text with blanks needs quotation marks"


def takes_engine_args(name: str | None = None, /, **defaults: Any) -> Callable[[Callable], Callable]:
    """Decorate `command(args: EngineArgs, …)`. In place of `args`, the new command has a flag for each field
    of EngineArgs, and an argument MODEL, which means the same as the flag --model. vLLM's flags that are no
    fields are accepted with a value that asks for nothing (`NEUTRAL`).

    `name` is the command's name in error messages, by default the function's. `defaults` replace defaults of
    fields. The command ends with exit status 1 if EngineArgs refuses the flags' values.
    """

    def decorate(command: Callable) -> Callable:
        command_name = name or command.__name__
        specs = fields(EngineArgs)

        @wraps(command)
        def from_flags(**flag_values: Any) -> None:
            model_tag = flag_values.pop(MODEL_ARGUMENT, None)
            option_values = {}
            with refusals(command_name):
                for spec in specs:
                    option_values[spec.name] = _value(spec, flag_values.pop(spec.name))
                option_values["model"] = _model(option_values["model"], model_tag)
                args = EngineArgs(**option_values)
            command(args=args, **flag_values)

        # Arguments, which have no default, come first, because the help keeps this order.
        arguments, options = [], []
        for declared in inspect.signature(command).parameters.values():
            parameter = declared.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            if parameter.name == "args":
                continue
            if parameter.default is parameter.empty:
                arguments.append(parameter)
            else:
                options.append(parameter)
        model_argument = _model_argument(is_last=not arguments)
        flags = [_parameter(spec, defaults) for spec in specs]
        set_parameters(from_flags, [model_argument, *arguments, *flags, *options])
        return takes_neutral_flags(command_name, NEUTRAL)(from_flags)

    return decorate


def _model_argument(is_last: bool) -> inspect.Parameter:
    """The parameter from which typer makes the argument MODEL. `is_last`: no other argument follows it.

    Typer gives the last argument of `ruvon generate [MODEL] PROMPT` to PROMPT only if MODEL takes any number
    of values; `_model` refuses more than one.
    """
    setting = typer.Argument(metavar="MODEL", help="The same as --model.", show_default=False)
    value_type: Any = str if is_last else list[str]
    annotation = Annotated[value_type | None, setting]
    return inspect.Parameter(
        MODEL_ARGUMENT, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def _model(flag_value: str | None, model_tag: str | Sequence[str] | None) -> Any:
    """The model, from the flag --model and from the argument MODEL; by default the field's default. Raises
    ValueError for two different models, and for two arguments.
    """
    arguments: list[str] = []
    if isinstance(model_tag, str):
        arguments = [model_tag]
    elif model_tag is not None:
        arguments = list(model_tag)
    if len(arguments) > 1:
        raise ValueError(f"{' '.join(arguments)}: {ONE_MODEL}")
    if not arguments:
        return EngineArgs.model if flag_value is None else flag_value
    if flag_value is not None and flag_value != arguments[0]:
        raise ValueError(f"MODEL {arguments[0]} and --model {flag_value}: one of them is accepted")
    return arguments[0]


def _parameter(spec: Field, defaults: Mapping[str, Any]) -> inspect.Parameter:
    """The parameter from which typer makes the flag of this field. `defaults` replace defaults of fields."""
    default = defaults.get(spec.name, spec.default)
    value_type = _flag_type(spec.type)
    settings = _option_settings(spec, value_type)
    if spec.name == "model":
        # With the default None, `_model` sees whether --model was given beside MODEL.
        settings["show_default"] = str(default)
        default = None
    option = typer.Option(*_flag_names(spec, value_type), **settings)
    annotation: Any = Annotated[value_type, option]
    if default is None:
        annotation = Annotated[value_type | None, option]
    return inspect.Parameter(
        spec.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _flag_names(spec: Field, value_type: type) -> list[str]:
    """The names of the field's flag, or none to have typer make --flag, and for a bool --no-flag as well."""
    flag = "--" + with_dashes(spec.name)
    if spec.name in SHORT_NAMES:
        return [flag, SHORT_NAMES[spec.name]]
    if value_type is bool and spec.default is False:
        return [flag]  # a flag that is off by default needs no --no-flag; one with the default None does
    return []


def _option_settings(spec: Field, value_type: type) -> dict[str, Any]:
    """The arguments of typer.Option for the field's flag: its help, and how its value is read."""
    literals: list[str] = []
    if value_type is str:  # the choices of a bool, True and False, are no texts
        literals = [str(choice) for choice in choices(spec.type) if choice is not None]
    help_text, example = spec.metadata["help"], spec.metadata["example"]
    if literals:
        help_text = f"{'|'.join(literals)}: {help_text}"
    elif example:
        help_text += f" For example: {example}"
    extension = spec.metadata["extension"]
    settings = {
        "help": help_text,
        "rich_help_panel": spec.metadata["topic"],
        "hidden": extension is not None and not is_here(extension),  # EngineArgs would refuse the flag
    }
    if value_type is int:
        settings |= {"parser": whole_number, "metavar": "INTEGER"}
    completions = [*literals, *spec.metadata["completions"]]
    if completions:
        settings["autocompletion"] = _completion(completions)
    return settings


def _completion(values: list[str]) -> Callable[[str], list[str]]:
    """A function with which a shell completes a value: it returns the `values` that begin with a text."""

    def complete(incomplete: str) -> list[str]:  # typer requires this parameter's name
        return [value for value in values if value.startswith(incomplete)]

    return complete


def _flag_type(declared: Any) -> type:
    """The type that typer reads from the command line for a field with the declared type."""
    members = [member for member in union_members(declared) if member is not NoneType]
    return members[0] if members[0] in TYPER_TYPES else str


def _value(spec: Field, flag_value: Any) -> Any:
    """The field's value from the flag's value. The flag of a field that is a mapping takes JSON. Raises
    ValueError if that flag's value is not JSON.
    """
    if flag_value is None or not takes_mapping(spec.type):
        return flag_value
    try:
        return json.loads(flag_value)
    except json.JSONDecodeError as error:
        raise ValueError(f"--{with_dashes(spec.name)}: not JSON: {error}") from None
