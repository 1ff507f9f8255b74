"""Jinja's sandbox, with bounds on what a template takes: characters and time. Part 14.

A chat template is a stranger's program. Jinja's own sandbox keeps it from this process and its files; this
one also counts what it makes. Each loop, call, filter, operator and printed value is charged the characters
that it may come to, before it is computed, and each step a few more: a render ends with `TooMuch` once LIMIT
of them are used up, or SECONDS are over. So no thread has to be killed, and memory stays within a few times
LIMIT. What is not charged is a single comparison of lists: nested for the purpose, two of them take long.
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

LIMIT = (
    1 << 25
)  # characters, of all that is made on the way: a prompt of a million tokens has about 4 million
STEP = 64  # characters that a step costs by itself: an item of a loop or of a list, a call, an operator
SECONDS = 10.0
LARGEST_BITS = 4096  # of a whole number
COUNTED, JOINED = "counted iterations", "joined pieces"  # filters: no template can write names with a space
WRITES = {"format", "join", "pprint", "string", "sum", "tojson", "urlencode", "xmlattr"}  # all of their value
WIDTHS = re.compile(r"%(?:\([^()%]*\))?[-+ #\d.*]*|:[^{}:]*\}")  # in formats: "%20d", "{:>20}"
Text = str | bytes


class TooMuch(TemplateError):
    """A template that makes more than LIMIT characters, or takes more than SECONDS."""


class Budget:
    """What one render may still use."""

    def __init__(self) -> None:
        self.left, self.end = LIMIT, time.monotonic() + SECONDS

    def charge(self, characters: int) -> None:
        """Raises TooMuch: they are more than are left, or the time is over."""
        self.left -= STEP + characters
        if self.left < 0:
            raise TooMuch(f"the chat template makes more than {LIMIT:,} characters")
        if time.monotonic() > self.end:
            raise TooMuch(f"the chat template takes more than {SECONDS:g} seconds")

    def counted(self, items: Iterable[Any], characters: int = 0) -> Iterator[Any]:
        """The items, each charged when it is taken, with what a loop's body writes by itself."""
        for item in items:
            self.charge(characters)
            yield item


_budget: ContextVar[Budget] = ContextVar("budget")  # of the render that runs in this thread


def length(value: Any, most: int = LIMIT) -> int:
    """How many characters `value` has, written out, and a step for each part of it; `most` is enough."""
    total, stack = 0, [value]
    while stack and total <= most:
        part = stack.pop()
        total += STEP
        if isinstance(part, Text):
            total += len(part)
        elif isinstance(part, int):
            total += part.bit_length() // 3
        elif isinstance(part, Mapping):
            stack += [*part.keys(), *part.values()]
        elif isinstance(part, list | tuple | set | frozenset | ItemsView | ValuesView):
            stack += part
            total += len(part)
    return total


def _whole(values: Iterable[Any]) -> int:
    """The largest whole number among arguments: how wide, how many."""
    return max((abs(value) for value in values if isinstance(value, int)), default=0)


class _Namespace(Namespace):
    """May hold itself: it is not written out."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _Hooked(NodeTransformer):
    """Has loops and `a ~ b` go through filters of this sandbox, as Jinja has no hooks for the two."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment

    def visit_For(self, node: nodes.For) -> nodes.Node:
        written = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        node.iter = self._filter(COUNTED, node.iter, nodes.Const(written, lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._filter(JOINED, nodes.List(node.nodes, lineno=node.lineno))

    def _filter(self, name: str, value: nodes.Node, *arguments: nodes.Node) -> nodes.Filter:
        return nodes.Filter(
            value, name, list(arguments), [], None, None, lineno=value.lineno, environment=self.environment
        )


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox in which `render` has bounds."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, extensions: list[type[Extension]], filters: Mapping[str, Callable[..., Any]]) -> None:
        # Nothing is computed while a template is read: what is printed depends on the render's budget.
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=extensions, optimized=False, finalize=_printed
        )
        self.filters |= filters
        for name, function in self.filters.items():
            self.filters[name] = _charged(name, function)
        self.filters |= {COUNTED: _counted, JOINED: _joined}
        del self.globals["lipsum"]
        self.globals["namespace"] = _Namespace

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Hooked(self).visit(super()._parse(source, name, filename))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """`left operator right`, once what it makes has been charged."""
        budget = _budget.get()
        if isinstance(left, int) and isinstance(right, int):
            bits = {"*": left.bit_length() + right.bit_length(), "**": left.bit_length() * max(right, 0)}
            if bits.get(operator, 0) > LARGEST_BITS:
                raise TooMuch(f"the chat template makes a number of more than {LARGEST_BITS:,} bits")
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(times, int) and isinstance(value, Sized):
                    budget.charge(len(value) * max(times, 0))
        elif operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            budget.charge(len(left) + len(right))
        elif operator == "%" and isinstance(left, Text):
            _charge_format(budget, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """`obj(...)`, charged for what a method of a text may make of it, and for the text that comes."""
        budget = _budget.get()
        text = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)  # Jinja wraps str.format
        if isinstance(obj, LoopContext):  # `loop(items)`: a recursive loop goes on with them
            args = (budget.counted(args[0]), *args[1:]) if args else args
        elif isinstance(text, Text | int):
            args = tuple(list(islice(a, LIMIT)) if isinstance(a, Iterator) else a for a in args)
            budget.charge(_method(budget, obj.__name__, text, (*args, *kwargs.values())))
        value = super().call(context, obj, *args, **kwargs)
        budget.charge(len(value) if isinstance(value, Text | list) else 0)
        return value


def render(template: Template, values: Mapping[str, Any]) -> str:
    """The text of a template of a `BoundedEnvironment`. Raises TooMuch, or what the template does."""
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


def _method(budget: Budget, name: str, text: Any, arguments: tuple[Any, ...]) -> int:
    """How many characters a method of a text (or of a number) may come to."""
    own = len(text) if isinstance(text, Text) else 0
    if name == "replace" and len(arguments) > 1:
        old, new = arguments[:2]
        times = text.count(old) if isinstance(old, type(text)) else 0
        return own + (times * len(new) if isinstance(new, Text) else 0)
    if name in ("format", "format_map"):
        _charge_format(budget, text, arguments)
        return own
    if name in ("join", "translate"):
        number = max((len(a) for a in arguments if isinstance(a, Sized)), default=0)
        size = length(arguments)
        return size + own * number if name == "join" else own * size
    return own + _whole(arguments) * (own + 1 if name == "expandtabs" else 1)


def _charge_format(budget: Budget, form: Any, values: Any) -> None:
    """A format: itself, its values, and how wide it says that they are to be."""
    form = form.decode("latin-1") if isinstance(form, bytes) else str(form)
    widths = sum(int(digits[:12]) for span in WIDTHS.findall(form) for digits in re.findall(r"\d+", span))
    named = "*" in form or re.search(r"\{[^{}]*\{", form)  # widths that are values themselves
    values = values if isinstance(values, tuple) else (values,)
    times = 1 + form.count("{") + form.count("%")
    size = length(values) * times
    budget.charge(len(form) + widths + size + (_whole(values) * times if named else 0))


def written(value: Any) -> str:
    """`value` as text, once that has been charged."""
    _budget.get().charge(length(value))
    return str(value)


@pass_context
def _printed(context: Context, value: Any) -> str:
    return written(value)


def _counted(items: Iterable[Any], characters: int) -> Iterator[Any]:
    return _budget.get().counted(items, characters)


def _joined(pieces: list[Any]) -> str:
    return "".join(map(written, pieces))


def _charged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that is charged before and behind."""
    passed = 1 if hasattr(function, "jinja_pass_arg") else 0  # its first argument is Jinja's

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        value, *others = args[passed:]
        arguments = (*others, *kwargs.values())
        if isinstance(value, Iterator) and name in WRITES:
            value = list(islice(value, LIMIT))
            args = (*args[:passed], value, *others)
        if name == "format":
            _charge_format(budget, value, arguments)
        elif name == "replace":
            budget.charge(_method(budget, "replace", written(value), arguments))
        elif name in WRITES:
            items = len(value) if isinstance(value, Sized) else 1
            budget.charge(length(value) + items * length(arguments) + length(value) * _whole(arguments))
        elif name not in ("default", "d"):  # they give their argument as it is
            own = len(value) if isinstance(value, Text) else 0
            times = {"indent": own and value.count("\n"), "wordwrap": own, "urlize": own}.get(name, 0) + 1
            widest = max((len(argument) for argument in arguments if isinstance(argument, Text)), default=0)
            budget.charge(own + times * max(widest, _whole(arguments)))
        result = function(*args, **kwargs)
        budget.charge(len(result) if isinstance(result, Text | list) else 0)
        return result

    return bounded
