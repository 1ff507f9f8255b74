"""Jinja's sandbox, with limits on the characters and the time that a template takes. Part 14.

A chat template is a program from an unknown author. Jinja's own sandbox keeps it from this process and its
files. This sandbox also limits what a render computes. Each render has a `Budget` of MAX_CHARACTERS and
MAX_SECONDS. A render that exceeds it ends with `BudgetExceeded`. So no thread has to be killed, and memory
stays within a few times MAX_CHARACTERS.

- The budget is charged for each item of a loop, each call, filter and printed value, the operators `+`, `*`
  and `%` on texts or lists, and `~`. What can make a long text is charged before it is computed, with the
  most characters that it may make (template_costs.py).
- A whole number that a product, a power, a call or a filter makes has at most MAX_INT_BITS.
- Other operators, slices and tests make nothing longer than their operands, and are not charged, except for
  the two tests that write their value as text.
- Two operations can still be slow: a comparison of deeply nested lists, and the filter `sum` of many lists.
"""

import functools
import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextvars import ContextVar
from typing import Any

from jinja2 import Environment, Template, TemplateError, Undefined, nodes, pass_context
from jinja2.ext import Extension
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from engine.decoding.template_costs import (
    MAX_CHARACTERS,
    STEP_CHARACTERS,
    TEXT_FILTERS,
    WRITING_FILTERS,
    Text,
    as_list,
    filter_characters,
    format_characters,
    largest_int,
    method_characters,
    sum_of_numbers,
    written_length,
)

MAX_SECONDS = 10.0  # that one render may take
MAX_INT_BITS = 4096  # of a whole number that is made

# The names of two filters of this sandbox. A template cannot call them, because of the space in each name.
CHARGE_ITEMS, JOIN_PIECES = "charge items", "join pieces"


class BudgetExceeded(TemplateError):
    """The template makes more than MAX_CHARACTERS, or takes more than MAX_SECONDS."""


class Budget:
    """The characters and the time that one render may still use."""

    def __init__(self) -> None:
        self.characters, self.deadline = MAX_CHARACTERS, time.monotonic() + MAX_SECONDS

    def charge(self, characters: int) -> None:
        """Charge for a step that makes up to `characters` characters: subtract these, and STEP_CHARACTERS.
        Raises BudgetExceeded if fewer are left, or if the time is over.
        """
        self.characters -= STEP_CHARACTERS + characters
        if self.characters < 0:
            raise BudgetExceeded(f"the chat template makes more than {MAX_CHARACTERS:,} characters")
        if time.monotonic() > self.deadline:
            raise BudgetExceeded(f"the chat template takes more than {MAX_SECONDS:g} seconds")

    def charge_result(self, result: Any) -> None:
        """Charge for the text or the list that a call or a filter has returned. Raises BudgetExceeded, also
        for a whole number of too many bits, such as the filter `int` reads from a text.
        """
        if isinstance(result, int):
            _refuse_bits(result.bit_length())
        num_characters = len(result) if isinstance(result, Text | list) else 0  # or items
        self.charge(num_characters)

    def charge_items(self, items: Iterable[Any], body_characters: int = 0) -> Iterator[Any]:
        """Yield a loop's items, and charge for each one.

        `body_characters` is charged with each item: the length of all literal text in the loop, whether or
        not an item's pass writes it. `render` charges only for text that leaves the template, and not for
        what `{% set x %}` or a macro collects.
        """
        for item in items:
            self.charge(body_characters)
            yield item


_budget: ContextVar[Budget] = ContextVar("budget")  # the budget of the render that runs in this thread


def render(template: Template, values: Mapping[str, Any]) -> str:
    """Render a template of a `BoundedEnvironment` with these values, by name.

    Raises BudgetExceeded if the render exceeds its budget, and any error that the template raises.
    """
    budget = Budget()
    token = _budget.set(budget)
    try:
        pieces = []
        for piece in template.generate(values):
            budget.charge(len(piece))
            pieces.append(piece)
        return "".join(pieces)
    finally:
        _budget.reset(token)


def charge(characters: int) -> None:
    """Charge for a step of the present render: `Budget.charge`. Only inside `render`."""
    _budget.get().charge(characters)


def to_text(value: Any) -> str:
    """str(value), charged before it is computed. Only inside `render`."""
    _budget.get().charge(written_length(value))
    return str(value)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox for templates, which charge the budget of `render`."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, extensions: list[type[Extension]], filters: Mapping[str, Callable[..., Any]]) -> None:
        """`filters` are added to Jinja's own filters, by name."""
        # The optimizer is off, because it would compute constants without a budget while a template is read.
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=extensions, optimized=False, finalize=_printed
        )
        self.filters |= filters
        for name, function in self.filters.items():
            self.filters[name] = _charged_filter(name, function)
        self.filters |= {CHARGE_ITEMS: _charge_items, JOIN_PIECES: _join_pieces}
        del self.globals["lipsum"]  # this function makes text of any length
        self.globals["namespace"] = _Namespace
        # These two tests compute str(value).
        self.tests["lower"] = lambda value: to_text(value).islower()
        self.tests["upper"] = lambda value: to_text(value).isupper()
        self.undefined = _Undefined

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _ChargeLoopsAndConcats(self).visit(super()._parse(source, name, filename))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute `left operator right`, of `intercepted_binops`. A text or a list is charged first. Raises
        BudgetExceeded, also for a whole number of too many bits.
        """
        budget = _budget.get()
        if isinstance(left, int) and isinstance(right, int):
            _refuse_large_int(operator, left, right)
        elif operator == "*":
            for value, times in ((left, right), (right, left)):  # "a" * 3, and 3 * "a"
                if isinstance(value, Sized) and isinstance(times, int):
                    budget.charge(len(value) * max(times, 0))
        elif operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            budget.charge(len(left) + len(right))
        elif operator == "%" and isinstance(left, Text):
            budget.charge(format_characters(left, right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `obj`. A method of a text or a number is charged before the call, for the most characters that
        it may make. Every call is charged for the text or list that it returns.
        """
        budget = _budget.get()
        method = getattr(obj, "__wrapped__", obj)  # Jinja wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(obj, LoopContext):  # `loop(items)` runs a recursive loop over these items
            if args:
                args = (budget.charge_items(args[0]), *args[1:])
        elif isinstance(owner, str) and obj.__name__ == "format":
            self._charge_format(owner, args, kwargs)
        elif isinstance(owner, str) and obj.__name__ == "format_map" and len(args) == 1:
            self._charge_format(owner, (), args[0])
        elif isinstance(owner, Text | int):
            args = tuple(as_list(argument) for argument in args)
            budget.charge(method_characters(obj.__name__, owner, (*args, *kwargs.values())))
        elif isinstance(owner, list):  # the error of `index` writes the argument
            budget.charge(written_length(args))
        result = super().call(context, obj, *args, **kwargs)
        budget.charge_result(result)
        return result

    def _charge_format(self, text: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Charge for `text.format(*args, **kwargs)`, by formatting once: each field is charged before it is
        written. The text is dropped, since Jinja's own `call` formats again.
        """
        _ChargedFormatter(self).vformat(text, args, kwargs)


class _ChargedFormatter(SandboxedFormatter):
    """Formats as `str.format` does in Jinja's sandbox. Each field is charged before it is written: only then
    its width is known, which may itself be the text or an attribute of a value ("{:{a.b}}").
    """

    def convert_field(self, value: Any, conversion: Any) -> Any:
        if conversion is not None:  # "!r", "!s" or "!a"
            _budget.get().charge(written_length(value))
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> str:
        _budget.get().charge(written_length(value) + sum_of_numbers(format_spec))
        return super().format_field(value, format_spec)


class _ChargeLoopsAndConcats(NodeTransformer):
    """Passes the items of loops, and the pieces of `a ~ b`, through the two filters of this sandbox.

    The syntax tree is changed because Jinja has no hooks for loops and `~`.
    """

    def __init__(self, environment: Environment) -> None:
        self.environment = environment

    def visit_For(self, node: nodes.For) -> nodes.Node:
        body_characters = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        node.iter = self._filter(CHARGE_ITEMS, node.iter, nodes.Const(body_characters, lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._filter(JOIN_PIECES, nodes.List(node.nodes, lineno=node.lineno))

    def _filter(self, name: str, value: nodes.Node, *arguments: nodes.Node) -> nodes.Filter:
        return nodes.Filter(
            value, name, list(arguments), [], None, None, lineno=value.lineno, environment=self.environment
        )


def _charge_items(items: Iterable[Any], body_characters: int) -> Iterator[Any]:
    """The filter CHARGE_ITEMS: `Budget.charge_items` of the present render."""
    return _budget.get().charge_items(items, body_characters)


def _join_pieces(pieces: list[Any]) -> str:
    """The filter JOIN_PIECES: the pieces of `a ~ b` as one text, each charged."""
    return "".join(map(to_text, pieces))


class _Undefined(Undefined):
    """Jinja's Undefined, whose error writes the name that was looked up: any value, as in `x[y]`."""

    @property
    def _undefined_message(self) -> str:
        _budget.get().charge(written_length(self._undefined_name))
        return super()._undefined_message


@pass_context
def _printed(context: Context, value: Any) -> str:
    """The text of `{{ value }}`. Because of the argument `context`, Jinja calls this function at each render,
    and not while it reads the template.
    """
    return to_text(value)


class _Namespace(Namespace):
    """Jinja's Namespace, but its text leaves out its contents, because a namespace may hold itself."""

    def __repr__(self) -> str:
        return "<Namespace>"


def _charged_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, charged for the most characters that it may make before it runs, and for its result."""
    # Jinja passes a context or an environment to some filters as the first argument.
    num_leading = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def charged(*args: Any, **kwargs: Any) -> Any:
        # 1. Bring named arguments into the order of the parameters.
        if kwargs:
            bound = inspect.signature(function).bind(*args, **kwargs)
            args, kwargs = bound.args, bound.kwargs
        leading = args[:num_leading]
        value = args[num_leading]
        others = list(args[num_leading + 1 :])
        # 2. Make here what the filter would make itself: a list of the items of an iterator, so that they can
        #    be counted, or the text of a value, which is charged.
        if name in WRITING_FILTERS:
            value = as_list(value)
            others = [as_list(argument) for argument in others]
            kwargs = {key: as_list(argument) for key, argument in kwargs.items()}
        elif name in TEXT_FILTERS and not isinstance(value, str):
            value = to_text(value)
        elif name == "round":  # it computes 10**precision
            _refuse_large_int("**", 10, largest_int(others))
        if name == "replace":  # it replaces the texts of its first two arguments
            others[:2] = [to_text(argument) for argument in others[:2]]
        # 3. Charge, call the filter, and charge for its result.
        budget = _budget.get()
        budget.charge(filter_characters(name, value, (*others, *kwargs.values())))
        result = function(*leading, value, *others, **kwargs)
        budget.charge_result(result)
        return result

    return charged


def _refuse_large_int(operator: str, left: int, right: int) -> None:
    """Raises BudgetExceeded if the product or the power may have more than MAX_INT_BITS bits."""
    bits = 0
    if operator == "*":
        bits = left.bit_length() + right.bit_length()
    elif operator == "**":
        bits = left.bit_length() * max(right, 0)
    _refuse_bits(bits)


def _refuse_bits(bits: int) -> None:
    """Raises BudgetExceeded for a whole number of so many bits, if they are more than MAX_INT_BITS."""
    if bits > MAX_INT_BITS:
        raise BudgetExceeded(f"the chat template makes a number of more than {MAX_INT_BITS:,} bits")
