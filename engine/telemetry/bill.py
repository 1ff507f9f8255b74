"""Prices, and a bill: time by kind, and what it comes to. Part 19.

Promises exact arithmetic. Time is in whole nanoseconds; dollars are fractions, rounded where people read
them and nowhere else. Knows no engine.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from engine.telemetry.shares import share_out

NS_PER_HOUR = 3600 * 10**9
# What requests pay for, by what their time went to.
PAID_KINDS = ("cached", "input", "output")
# What the operator pays for. `under_way` is of the moment: the time since the last step landed.
UNPAID_KINDS = ("recomputed", "failed", "late", "idle", "under_way")
AMOUNT = re.compile(r"[0-9]{1,7}(\.[0-9]{1,9})?")


def amount(name: str, text: str) -> Fraction:
    """Dollars as people write them. Raises ValueError that names the field."""
    if not AMOUNT.fullmatch(text.strip()):
        raise ValueError(
            f"{name}={text!r}: dollars such as 2.50 are accepted, at most 7 digits before the point and 9 "
            "behind it"
        )
    return Fraction(text.strip())


@dataclass(frozen=True)
class Price:
    """Dollars for an hour of the device, busy or not."""

    per_hour: Fraction

    @classmethod
    def parse(cls, text: str) -> "Price":
        """Raises ValueError: no amount, or nothing."""
        price = cls(amount("price_per_hour", text))
        if not price.per_hour:
            raise ValueError(f"price_per_hour={text!r}: more than 0 is accepted")
        return price

    def of(self, ns: int) -> Fraction:
        """Dollars for so many nanoseconds."""
        return self.per_hour * ns / NS_PER_HOUR


@dataclass(frozen=True)
class ApiPrice:
    """What a hosted API takes, in dollars for a million tokens of each kind."""

    cached: Fraction
    input: Fraction
    output: Fraction

    @classmethod
    def parse(cls, text: str) -> "ApiPrice":
        """From "cached,input,output". Raises ValueError: not three amounts, or one that is none."""
        amounts = text.split(",")
        if len(amounts) != len(PAID_KINDS):
            raise ValueError(
                f"api_price={text!r}: three amounts are accepted, {','.join(PAID_KINDS)}, in dollars for a "
                "million tokens"
            )
        dollars = (
            amount(f"api_price ({kind})", part) for kind, part in zip(PAID_KINDS, amounts, strict=True)
        )
        return cls(*dollars)

    def of(self, tokens: Mapping[str, int]) -> Fraction:
        """Dollars for so many tokens of each kind."""
        return sum((getattr(self, kind) * tokens[kind] for kind in PAID_KINDS), Fraction(0)) / 10**6


@dataclass(frozen=True)
class Bill:
    """The time from a meter's start to the moment it was read."""

    price: Price
    ns: Mapping[str, int]  # by kind, PAID_KINDS and UNPAID_KINDS: all the time there was
    tokens: Mapping[str, int]  # by kind: cached and input tokens of prompts, output tokens
    num_ended: int  # requests

    @property
    def total_ns(self) -> int:
        return sum(self.ns.values())

    @property
    def total(self) -> Fraction:
        """Dollars for all of it."""
        return self.price.of(self.total_ns)

    @property
    def utilization(self) -> float:
        """Which share of the time requests pay for; 0 before any time has passed."""
        return sum(self.ns[kind] for kind in PAID_KINDS) / (self.total_ns or 1)

    @property
    def per_output_token(self) -> Fraction | None:
        """The whole bill, idle time too, by its output tokens. None: there are none yet."""
        return self.total / self.tokens["output"] if self.tokens["output"] else None

    def per_token(self, kind: str) -> Fraction | None:
        """What requests paid for one token of a kind, on average. None: there was none."""
        return self.price.of(self.ns[kind]) / self.tokens[kind] if self.tokens[kind] else None

    def cents(self) -> dict[str, int]:
        """The bill in whole cents, by kind: the lines add up to the rounded total."""
        total = math.floor(self.total * 100 + Fraction(1, 2))
        return dict(zip(self.ns, share_out(total, list(self.ns.values())), strict=True))


def money(dollars: Fraction | None) -> str:
    """For people: to the cent from a dollar on, else to three significant digits."""
    if dollars is None:
        return "–"
    if not dollars:
        return "$0"
    rounded = float(f"{float(dollars):.3g}")  # 0.9996 becomes 1
    if rounded >= 1:
        return f"${float(dollars):,.2f}"
    decimals = 2 - math.floor(math.log10(rounded))  # 2 digits behind the first that is not 0
    return f"${rounded:.{decimals}f}"
