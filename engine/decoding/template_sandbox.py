"""Jinja's sandbox, with bounds on what a template takes: characters and time. Part 14.

A chat template is a stranger's program. Jinja's own sandbox keeps it from this process and its files. This
one also bounds what a render makes: each item of a loop, call, filter, operator and printed value is charged
to a `Budget`, with the characters that it may come to, before it is computed. `TooMuch` ends a render that
has used up MAX_CHARACTERS or SECONDS. So no thread has to be killed, and memory stays within a few times
MAX_CHARACTERS. One thing is not charged: a single comparison of lists. Lists that are nested for the purpose
make it long.

From top to bottom: the budget, `render`, the environment that charges it, and how much each thing is charged.
"""

import functools
import re
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sized, ValuesView
from contextvars import ContextVar
from itertools import islice
from typing import Any

from jinja2 import Environment, Template, TemplateError, nodes, pass_context
from jinja2.ext import Extension
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_CHARACTERS = 2**25  # made in a render, on the way too: a prompt of a million tokens has about 4 million
STEP = 64  # characters that a step is charged by itself: an item of a loop or of a list, a call, an operator
SECONDS = 10.0
MAX_INT_BITS = 4096
Text = str | bytes

# Two filters of this sandbox. No template can call them: a name has no space there.
COUNTED, JOINED = "counted iterations", "joined pieces"
# Filters that write out all of their value.
WRITING_FILTERS = {"format", "join", "pprint", "string", "sum", "tojson", "urlencode", "xmlattr"}
FORMAT_FIELD = re.compile(r"%(?:\([^()%]*\))?[-+ #\d.*]*|:[^{}:]*\}")  # with its width: "%20d", "{:>20}"


class TooMuch(TemplateError):
    """The template makes more than MAX_CHARACTERS, or takes more than SECONDS."""


class Budget:
    """What one render may still use."""

    def __init__(self) -> None:
        self.characters, self.deadline = MAX_CHARACTERS, time.monotonic() + SECONDS

    def charge(self, characters: int) -> None:
        """Take so many characters and a STEP. Raises TooMuch: not so many are left, or the time is over."""
        self.characters -= STEP + characters
        if self.characters < 0:
            raise TooMuch(f"the chat template makes more than {MAX_CHARACTERS:,} characters")
        if time.monotonic() > self.deadline:
            raise TooMuch(f"the chat template takes more than {SECONDS:g} seconds")

    def counted(self, items: Iterable[Any], characters: int = 0) -> Iterator[Any]:
        """The items, each charged when it is taken. `characters`: that a loop's body writes by itself."""
        for item in items:
            self.charge(characters)
            yield item


_budget: ContextVar[Budget] = ContextVar("budget")  # of the render that runs in this thread


def render(template: Template, values: Mapping[str, Any]) -> str:
    """The text of a template of a `BoundedEnvironment`. Raises TooMuch, or what the template raises."""
    budget = Budget()
    token = _budget.set(budget)
    try:
        pieces = []
        for piece in template.generate(**values):
            budget.charge(len(piece))
            pieces.append(piece)
        return "".join(pieces)
    finally:
        _budget.reset(token)


def to_text(value: Any) -> str:
    """`value` written out, once that is charged."""
    _budget.get().charge(written_length(value))
    return str(value)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates charge the budget of `render`."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, extensions: list[type[Extension]], filters: Mapping[str, Callable[..., Any]]) -> None:
        """`filters`: by name, beside Jinja's own."""
        # Not optimized: else Jinja would compute constants while it reads a template, without a budget.
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=extensions, optimized=False, finalize=_printed
        )
        self.filters |= filters
        for name, function in self.filters.items():
            self.filters[name] = _charged_filter(name, function)
        self.filters |= {COUNTED: _counted, JOINED: _joined}
        del self.globals["lipsum"]  # makes text of any length
        self.globals["namespace"] = _Namespace

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _ChargeLoopsAndConcats(self).visit(super()._parse(source, name, filename))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """`left operator right`, once its result is charged."""
        budget = _budget.get()
        if isinstance(left, int) and isinstance(right, int):
            _refuse_large_int(operator, left, right)
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, Sized) and isinstance(times, int):
                    budget.charge(len(value) * max(times, 0))
        elif operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            budget.charge(len(left) + len(right))
        elif operator == "%" and isinstance(left, Text):
            budget.charge(_format_characters(left, right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """`obj(...)`: a method of a text or a number is charged for what it may make, any other call for the
        text or list that it returns.
        """
        budget = _budget.get()
        method = getattr(obj, "__wrapped__", obj)  # Jinja wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(obj, LoopContext):  # `loop(items)`: a recursive loop goes on with them
            if args:
                args = (budget.counted(args[0]), *args[1:])
        elif isinstance(owner, Text | int):
            args = tuple(_as_list(argument) for argument in args)
            budget.charge(_method_characters(obj.__name__, owner, (*args, *kwargs.values())))
        result = super().call(context, obj, *args, **kwargs)
        budget.charge(len(result) if isinstance(result, Text | list) else 0)
        return result


class _ChargeLoopsAndConcats(NodeTransformer):
    """Has loops and `a ~ b` go through the two filters of this sandbox: Jinja has no hooks for them."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment

    def visit_For(self, node: nodes.For) -> nodes.Node:
        body_characters = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        node.iter = self._filter(COUNTED, node.iter, nodes.Const(body_characters, lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._filter(JOINED, nodes.List(node.nodes, lineno=node.lineno))

    def _filter(self, name: str, value: nodes.Node, *arguments: nodes.Node) -> nodes.Filter:
        return nodes.Filter(
            value, name, list(arguments), [], None, None, lineno=value.lineno, environment=self.environment
        )


def _counted(items: Iterable[Any], characters: int) -> Iterator[Any]:
    return _budget.get().counted(items, characters)


def _joined(pieces: list[Any]) -> str:
    return "".join(map(to_text, pieces))


@pass_context
def _printed(context: Context, value: Any) -> str:
    """`{{ value }}`. With a context as its argument, Jinja calls it at each render, not while it reads."""
    return to_text(value)


class _Namespace(Namespace):
    """Jinja's, but its contents are not written out: it may hold itself."""

    def __repr__(self) -> str:
        return "<Namespace>"


def _charged_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, charged for what it may make before it runs, and for its result."""
    # To such filters Jinja passes its context, or environment, as the first argument.
    num_leading = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def charged(*args: Any, **kwargs: Any) -> Any:
        leading, (value, *others) = args[:num_leading], args[num_leading:]
        if name in WRITING_FILTERS:
            value = _as_list(value)
        budget = _budget.get()
        _charge_filter(budget, name, value, (*others, *kwargs.values()))
        result = function(*leading, value, *others, **kwargs)
        budget.charge(len(result) if isinstance(result, Text | list) else 0)
        return result

    return charged


def _charge_filter(budget: Budget, name: str, value: Any, arguments: tuple[Any, ...]) -> None:
    """Charge what `value | name(arguments)` may come to."""
    if name in ("default", "d"):
        return  # it makes nothing
    if name == "format":
        characters = _format_characters(value, arguments)
    elif name == "replace":
        characters = _method_characters("replace", to_text(value), arguments)
    elif name in WRITING_FILTERS:
        num_items = len(value) if isinstance(value, Sized) else 1
        size = written_length(value)
        characters = size + num_items * written_length(arguments) + size * _largest_int(arguments)
    else:
        size = len(value) if isinstance(value, Text) else 0
        insertions = 1  # of an argument, or of as many spaces as one says
        if name == "indent" and size:
            insertions += value.count("\n")
        elif name in ("wordwrap", "urlize"):
            insertions += size
        longest = max((len(argument) for argument in arguments if isinstance(argument, Text)), default=0)
        characters = size + insertions * max(longest, _largest_int(arguments))
    budget.charge(characters)


def _method_characters(name: str, owner: Any, arguments: tuple[Any, ...]) -> int:
    """How many characters a method of a text, or of a number, may come to."""
    size = len(owner) if isinstance(owner, Text) else 0
    if name == "replace" and len(arguments) > 1:
        old, new = arguments[:2]
        replacements = owner.count(old) if isinstance(old, type(owner)) else 0
        return size + (replacements * len(new) if isinstance(new, Text) else 0)
    if name in ("format", "format_map"):
        return size + _format_characters(owner, arguments)
    if name == "join":
        num_items = max((len(argument) for argument in arguments if isinstance(argument, Sized)), default=0)
        return written_length(arguments) + size * num_items
    if name == "translate":
        return size * written_length(arguments)
    width = _largest_int(arguments)
    return size + width * (size + 1 if name == "expandtabs" else 1)


def _format_characters(template: Any, values: Any) -> int:
    """How many characters a format (`%` or `str.format`) may come to: itself, its values, and its widths."""
    text = template.decode("latin-1") if isinstance(template, bytes) else str(template)
    widths = 0  # that the text says
    for field in FORMAT_FIELD.findall(text):
        for digits in re.findall(r"\d+", field):
            widths += int(digits[:12])  # 12 digits are more than MAX_CHARACTERS
    values = values if isinstance(values, tuple) else (values,)
    num_fields = 1 + text.count("{") + text.count("%")  # at most; each may show all values
    has_width_values = "*" in text or re.search(r"\{[^{}]*\{", text)  # "%*d", "{:>{}}"
    value_widths = num_fields * _largest_int(values) if has_width_values else 0
    return len(text) + widths + num_fields * written_length(values) + value_widths


def written_length(value: Any) -> int:
    """How many characters `value` has, written out, with a STEP for each part of it. The count ends once it
    is more than MAX_CHARACTERS.
    """
    total, parts = 0, [value]
    while parts and total <= MAX_CHARACTERS:
        part = parts.pop()
        total += STEP
        if isinstance(part, Text):
            total += len(part)
        elif isinstance(part, int):
            total += part.bit_length() // 3  # a digit has more than three bits
        elif isinstance(part, Mapping):
            parts += [*part.keys(), *part.values()]
        elif isinstance(part, list | tuple | set | frozenset | ItemsView | ValuesView):
            parts += part
            total += len(part)
    return total


def _as_list(value: Any) -> Any:
    """An iterator as a list, whose items can be counted before they are used; anything else as it is."""
    return list(islice(value, MAX_CHARACTERS)) if isinstance(value, Iterator) else value


def _largest_int(values: Iterable[Any]) -> int:
    """The largest whole number among arguments, which may say how wide, or how many."""
    return max((abs(value) for value in values if isinstance(value, int)), default=0)


def _refuse_large_int(operator: str, left: int, right: int) -> None:
    """Raises TooMuch: the product or the power has more than MAX_INT_BITS."""
    bits = 0
    if operator == "*":
        bits = left.bit_length() + right.bit_length()
    elif operator == "**":
        bits = left.bit_length() * max(right, 0)
    if bits > MAX_INT_BITS:
        raise TooMuch(f"the chat template makes a number of more than {MAX_INT_BITS:,} bits")
