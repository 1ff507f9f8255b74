"""Regular expressions over bytes, and the derivative of an expression by a byte. Extension B.

The derivative of an expression by a byte matches what may follow that byte: of `ab|ac` by `a` it is `b|c`. So
a text is matched byte by byte, and without a search: after each byte, the derivative takes the place of the
expression. The text matches if the last derivative matches the empty text.

`chain`, `either` and `repeat` keep expressions in a simple form, so that equal rests of an expression are
equal objects. An expression that matches no text is always NOTHING.
Source: Brzozowski 1964, https://doi.org/10.1145/321239.321249.
"""

from dataclasses import dataclass
from typing import Union


@dataclass(frozen=True, slots=True)
class ByteSet:
    """Matches one byte of a set. Bit b of `bits` says whether byte b is in the set."""

    bits: int


@dataclass(frozen=True, slots=True)
class Chain:
    """Matches the items one after the other. Without items, it matches the empty text."""

    items: tuple["Expression", ...]


@dataclass(frozen=True, slots=True)
class Either:
    """Matches what one of the options matches. Without options, it matches no text."""

    options: frozenset["Expression"]


@dataclass(frozen=True, slots=True)
class Repeat:
    """Matches the item `least` to `most` times in a row. None as `most` means any number of times."""

    item: "Expression"
    least: int
    most: int | None


Expression = Union[ByteSet, Chain, Either, Repeat]  # noqa: UP007  # the classes above name it in strings
EMPTY = Chain(())  # matches the empty text
NOTHING = Either(frozenset())  # matches no text


def byte_set(bits: int) -> Expression:
    """One byte of the set, or NOTHING if the set is empty. `bits`: as in `ByteSet`."""
    return ByteSet(bits) if bits else NOTHING


def chain(*items: Expression) -> Expression:
    """The items one after the other. A chain among the items becomes a part of this chain."""
    flat: list[Expression] = []
    for item in items:
        if item == NOTHING:
            return NOTHING
        if isinstance(item, Chain):
            flat += item.items
        else:
            flat.append(item)
    return flat[0] if len(flat) == 1 else Chain(tuple(flat))


def either(*options: Expression) -> Expression:
    """One of the options. A choice among the options becomes a part of this choice, and all sets of bytes
    become one set.
    """
    flat: set[Expression] = set()
    bits = 0
    for option in options:
        inner_options = option.options if isinstance(option, Either) else (option,)
        for inner in inner_options:
            if isinstance(inner, ByteSet):
                bits |= inner.bits
            else:
                flat.add(inner)
    if bits:
        flat.add(ByteSet(bits))
    return next(iter(flat)) if len(flat) == 1 else Either(frozenset(flat))


def repeat(item: Expression, least: int, most: int | None) -> Expression:
    """The item, `least` to `most` times in a row. None as `most` means any number of times."""
    if most == 0 or item == EMPTY:
        return EMPTY
    if item == NOTHING:
        return EMPTY if least == 0 else NOTHING
    return item if (least, most) == (1, 1) else Repeat(item, least, most)


def matches_empty(expression: Expression) -> bool:
    """Whether the expression matches the empty text."""
    match expression:
        case ByteSet():
            return False
        case Chain(items):
            return all(map(matches_empty, items))
        case Either(options):
            return any(map(matches_empty, options))
        case Repeat(item, least, _):
            return least == 0 or matches_empty(item)


def derivative(expression: Expression, byte: int) -> Expression:
    """An expression that matches what may follow `byte` in the texts that `expression` matches; NOTHING if no
    such text begins with `byte`. By the kind of the expression:

    - ByteSet: if the byte is in the set, EMPTY, and otherwise NOTHING.
    - Either: one of the derivatives of the options.
    - Chain: the byte may belong to the first item: the derivative of the item, and then all later items. If
      the first item matches the empty text, the byte may also belong to the second item, and so on.
    - Repeat: the derivative of the item, and then the item repeated once less: `least` and `most` are one
      less, but `least` is never below 0, and None as `most` stays None.

    `chain`, `either` and `repeat` keep the results in their simple form.
    """
    match expression:
        case ByteSet(bits):
            return EMPTY if bits >> byte & 1 else NOTHING
        case Either(options):
            return either(*(derivative(option, byte) for option in options))
        case Repeat(item, least, most):
            fewer = repeat(item, max(0, least - 1), None if most is None else most - 1)
            return chain(derivative(item, byte), fewer)
        case Chain(items):
            results: list[Expression] = []
            for i, item in enumerate(items):
                results.append(chain(derivative(item, byte), *items[i + 1 :]))
                if not matches_empty(item):
                    break
            return either(*results)


def size(expression: Expression) -> int:
    """The number of expressions of which this expression is made, itself included."""
    match expression:
        case ByteSet():
            return 1
        case Chain(parts) | Either(parts):
            return 1 + sum(map(size, parts))
        case Repeat(item):
            return 1 + size(item)
