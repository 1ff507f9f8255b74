"""How many characters an operation of a chat template may make, at most, before it is computed. Part 14.

Estimates for template_sandbox.py, which charges them to a render's budget. An estimate may be too high. It
must not be so low that an operation within the budget needs much more memory than MAX_CHARACTERS.
"""

import re
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, Sized, ValuesView
from itertools import islice
from typing import Any

# Characters that one render may make, intermediate results included. A prompt of a million tokens has about 4
# million characters.
MAX_CHARACTERS = 2**25
# Characters charged for each step, beside those of its result: an item of a loop or of a list, a call, an
# operator on texts or lists. So a render of many steps ends, even if they make no text.
STEP_CHARACTERS = 64
Text = str | bytes

# Filters that are charged as if they converted their whole value to text.
WRITING_FILTERS = {"join", "pprint", "string", "sum", "tojson", "urlencode", "xmlattr"}
# Filters that compute str(value) themselves. So the sandbox makes this text for them.
TEXT_FILTERS = {
    "capitalize", "center", "e", "escape", "forceescape", "format", "lower", "replace", "safe", "striptags",
    "title", "trim", "upper", "wordcount",
}  # fmt: skip
# The flags, the width and the precision of a field of `%`, with the `%` or the name's `)` before them:
# "%20d", "%(name)-20s".
PERCENT_WIDTH = re.compile(r"[%)][-+ #\d.*]*")


def filter_characters(name: str, value: Any, arguments: tuple[Any, ...]) -> int:
    """The most characters that `value | name(arguments)` may make. The arguments are in the order of the
    filter's parameters.

    The caller has made lists of iterators for WRITING_FILTERS (`as_list`), and texts of the value for
    TEXT_FILTERS and of the first two arguments of "replace".
    """
    if name in ("default", "d"):
        return 0  # the filter returns its value or its argument
    if name == "format":
        return format_characters(value, arguments)
    if name == "replace":
        return method_characters("replace", value, arguments)
    if name == "tojson":
        return _tojson_characters(value, arguments)
    if name in WRITING_FILTERS:
        return _joined_characters(value, arguments)
    if name == "indent":
        return _indented_characters(value, arguments)
    if name in ("wordwrap", "urlize"):
        return _interspersed_characters(value, arguments)
    # "center", "batch", "round" and others: as many spaces, items or digits as an argument says, or one text.
    return _length(value) + max(_longest_text(arguments), largest_int(arguments))


def _tojson_characters(value: Any, arguments: tuple[Any, ...]) -> int:
    """`tojson` writes its separators at each part of the value, and its indent, which is a text or a number
    of spaces, once for each level that the part is deep. The estimate is STEP_CHARACTERS levels.
    """
    size = written_length(value)
    num_parts = size // STEP_CHARACTERS  # an upper bound: each part adds at least STEP_CHARACTERS to `size`
    separators = written_length(arguments)
    indent = max(_longest_text(arguments), largest_int(arguments))
    return size + num_parts * (separators + STEP_CHARACTERS * indent)


def _joined_characters(value: Any, arguments: tuple[Any, ...]) -> int:
    """`join` writes its separator between any two items: a text as it is, another value as str() writes it.
    No argument of the other WRITING_FILTERS is written more often.
    """
    num_items = len(value) if isinstance(value, Sized) else 1
    separators = 0  # the length of all arguments
    for argument in arguments:
        separators += len(argument) if isinstance(argument, Text) else written_length(argument)
    return written_length(value) + num_items * separators


def _indented_characters(value: Any, arguments: tuple[Any, ...]) -> int:
    """`indent` writes its width, which is a text or a number of spaces, before each line."""
    num_lines = len(value.splitlines()) if isinstance(value, Text) else 0
    return _length(value) + (num_lines + 1) * max(_longest_text(arguments), largest_int(arguments))


def _interspersed_characters(value: Any, arguments: tuple[Any, ...]) -> int:
    """`wordwrap` writes its `wrapstring`, and `urlize` its `rel` and `target`, at most once for each
    character of the value. Their numbers only shorten lines and links.
    """
    size = _length(value)
    return size + (size + 1) * sum(map(_length, arguments))


def method_characters(name: str, owner: Any, arguments: Sequence[Any]) -> int:
    """The most characters that a method of a text or of a number may make, other than `format` and
    `format_map`. `owner` is the text or number.
    """
    size = _length(owner)
    if name == "replace" and len(arguments) > 1:
        old, new = arguments[:2]
        replacements = owner.count(old) if isinstance(old, type(owner)) else 0
        return size + replacements * _length(new)
    if name == "join":
        num_items = max((len(argument) for argument in arguments if isinstance(argument, Sized)), default=0)
        return written_length(arguments) + size * num_items
    if name == "translate":
        return size * written_length(arguments)
    width = largest_int(arguments)
    if name == "expandtabs":  # each character may be a tab
        return size + width * (size + 1)
    return size + width


def format_characters(template: Any, values: Any) -> int:
    """The most characters that `template % values` may make: its text, values and widths."""
    text = template.decode("latin-1") if isinstance(template, bytes) else str(template)
    if not isinstance(values, tuple):
        values = (values,)
    characters_of_field = written_length(values)  # a field may show all of the values
    if "*" in text:  # in "%*d", a value is the width
        characters_of_field += largest_int(values)
    widths = sum(map(sum_of_numbers, PERCENT_WIDTH.findall(text)))
    return len(text) + widths + text.count("%") * characters_of_field


def sum_of_numbers(text: str) -> int:
    """The sum of the whole numbers that are written in a text, each counted as MAX_CHARACTERS + 1 at most.

    As in Python's formats, a number may have leading zeros, and its digits may be those of any script.
    """
    # float() reads numbers of any length, where int() refuses more than 4300 digits.
    numbers = map(float, re.findall(r"\d+", text))
    return sum(int(min(number, MAX_CHARACTERS + 1)) for number in numbers)


def written_length(value: Any) -> int:
    """An estimate of the characters of str(value), with STEP_CHARACTERS more for each part of the value.

    The count stops as soon as it exceeds MAX_CHARACTERS.
    """
    total, parts = 0, [value]
    while parts and total <= MAX_CHARACTERS:
        part = parts.pop()
        total += STEP_CHARACTERS
        if isinstance(part, Text):
            total += len(part)
        elif isinstance(part, int):
            total += part.bit_length() // 3  # a decimal digit stands for more than three bits
        elif isinstance(part, Mapping):
            parts += [*part.keys(), *part.values()]
        elif isinstance(part, list | tuple | set | frozenset | KeysView | ItemsView | ValuesView):
            parts += part
            total += len(part)
    return total


def as_list(value: Any) -> Any:
    """Convert an iterator to a list of at most MAX_CHARACTERS items, so that the items can be counted before
    they are used. Other values are returned unchanged.
    """
    return list(islice(value, MAX_CHARACTERS)) if isinstance(value, Iterator) else value


def largest_int(values: Iterable[Any]) -> int:
    """The largest absolute value of the ints among arguments, any of which may be a width or a count."""
    return max((abs(value) for value in values if isinstance(value, int)), default=0)


def _length(value: Any) -> int:
    """The length of a text; 0 for any other value."""
    return len(value) if isinstance(value, Text) else 0


def _longest_text(values: Iterable[Any]) -> int:
    """The length of the longest text among arguments."""
    return max(map(_length, values), default=0)
