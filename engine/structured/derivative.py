"""Regular expressions over bytes, and what is left of one behind a byte. Extension B.

The derivative of an expression by a byte matches what may follow that byte: of `ab|ac` by `a` it is `b|c`.
Whoever takes one derivative after another reads a text and needs no search: the text fits if what is left in
the end matches the empty text. Expressions are kept in one simple form, so that the same rest is equal to
itself, and an expression that matches nothing is `NOTHING` and no other.
Source: Brzozowski 1964, https://doi.org/10.1145/321239.321249.
"""

from dataclasses import dataclass
from typing import Union


@dataclass(frozen=True, slots=True)
class Bytes:
    """One byte of a set. `bits`: bit b says whether byte b is in it."""

    bits: int


@dataclass(frozen=True, slots=True)
class Chain:
    """The items one behind the other. Without items: the empty text."""

    items: tuple["Expression", ...]


@dataclass(frozen=True, slots=True)
class Either:
    """One of the options. Without options: nothing at all."""

    options: frozenset["Expression"]


@dataclass(frozen=True, slots=True)
class Repeat:
    """The item, `least` to `most` times; a `most` of None: any number of times."""

    item: "Expression"
    least: int
    most: int | None


Expression = Union[Bytes, Chain, Either, Repeat]  # noqa: UP007  # the classes name it before it is there
EMPTY = Chain(())
NOTHING = Either(frozenset())


def one_of(bits: int) -> Expression:
    """One byte of the set, or NOTHING if it is empty."""
    return Bytes(bits) if bits else NOTHING


def chain(*items: Expression) -> Expression:
    """The items one behind the other, without chains in chains."""
    flat: list[Expression] = []
    for item in items:
        if item == NOTHING:
            return NOTHING
        flat += item.items if isinstance(item, Chain) else (item,)
    return flat[0] if len(flat) == 1 else Chain(tuple(flat))


def either(*options: Expression) -> Expression:
    """One of the options, without choices in choices. Several sets of bytes become one set."""
    flat: set[Expression] = set()
    bits = 0
    for option in options:
        for inner in option.options if isinstance(option, Either) else (option,):
            if isinstance(inner, Bytes):
                bits |= inner.bits
            else:
                flat.add(inner)
    if bits:
        flat.add(Bytes(bits))
    return next(iter(flat)) if len(flat) == 1 else Either(frozenset(flat))


def repeat(item: Expression, least: int, most: int | None) -> Expression:
    """The item, `least` to `most` times."""
    if most == 0 or item == EMPTY:
        return EMPTY
    if item == NOTHING:
        return EMPTY if least == 0 else NOTHING
    return item if (least, most) == (1, 1) else Repeat(item, least, most)


def matches_empty(expression: Expression) -> bool:
    """Whether the empty text matches."""
    match expression:
        case Bytes():
            return False
        case Chain(items):
            return all(map(matches_empty, items))
        case Either(options):
            return any(map(matches_empty, options))
        case Repeat(item, least, _):
            return least == 0 or matches_empty(item)


def derivative(expression: Expression, byte: int) -> Expression:
    """What may follow `byte` in a text that matches `expression`; NOTHING if no such text begins with it.

    The byte uses up a set that has it. Each option goes on for itself. In a chain, the byte belongs to the
    first item, and the items behind it follow; or, if all items before it may be empty, to a later one. A
    repetition is left with what the byte leaves of one round, and behind that with one round less: `least`
    and `most` are one less, but `least` never below 0 and a `most` of None as it is. `chain`, `either` and
    `repeat` keep the results in their simple form.
    """
    match expression:
        case Bytes(bits):
            return EMPTY if bits >> byte & 1 else NOTHING
        case Either(options):
            return either(*(derivative(option, byte) for option in options))
        case Repeat(item, least, most):
            fewer = repeat(item, max(0, least - 1), None if most is None else most - 1)
            return chain(derivative(item, byte), fewer)
        case Chain(items):
            # The byte belongs to the first item; or, if all items before may be empty, to a later one.
            rests: list[Expression] = []
            for i, item in enumerate(items):
                rests.append(chain(derivative(item, byte), *items[i + 1 :]))
                if not matches_empty(item):
                    break
            return either(*rests)


def size(expression: Expression) -> int:
    """How many expressions it is made of, itself included."""
    match expression:
        case Bytes():
            return 1
        case Chain(parts) | Either(parts):
            return 1 + sum(map(size, parts))
        case Repeat(item):
            return 1 + size(item)
