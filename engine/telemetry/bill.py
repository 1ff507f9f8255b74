"""Prices, and a bill: the device's time by kind, and the cost of each kind in dollars. Part 19.

Promises exact amounts: times are whole nanoseconds, and dollars are fractions. Only `money` and `Bill.cents`
round them, for readers. Knows no engine.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from engine.telemetry.shares import share_out

NS_PER_HOUR = 3600 * 10**9
# Kinds of time that requests pay for: prompt tokens from the cache, other prompt tokens, output tokens.
PAID_KINDS = ("cached", "input", "output")
# Kinds of time that the operator pays for: tokens computed again after a preemption, failed steps, work for
# requests that had left, idle time, and `under_way`: the time from the end of the last step until now, which
# a later step or idle time will take.
UNPAID_KINDS = ("recomputed", "failed", "late", "idle", "under_way")
AMOUNT = re.compile(r"[0-9]{1,7}(\.[0-9]{1,9})?")


def amount(name: str, text: str) -> Fraction:
    """The dollars in `text`, such as "2.50". Raises ValueError, which mentions `name`, for any other text."""
    if not AMOUNT.fullmatch(text.strip()):
        raise ValueError(
            f"{name}={text!r}: dollars such as 2.50 are accepted, at most 7 digits before the point and 9 "
            "behind it"
        )
    return Fraction(text.strip())


@dataclass(frozen=True)
class Price:
    """The price of the device in dollars per hour, whether the device is busy or idle."""

    per_hour: Fraction

    @classmethod
    def parse(cls, text: str) -> "Price":
        """From a text such as "2.50". Raises ValueError if the text is not an amount above 0."""
        price = cls(amount("price_per_hour", text))
        if not price.per_hour:
            raise ValueError(f"price_per_hour={text!r}: more than 0 is accepted")
        return price

    def of(self, ns: int) -> Fraction:
        """The price of `ns` nanoseconds, in dollars."""
        return self.per_hour * ns / NS_PER_HOUR


@dataclass(frozen=True)
class ApiPrice:
    """The prices of a hosted API, in dollars per million tokens of each kind."""

    cached: Fraction
    input: Fraction
    output: Fraction

    @classmethod
    def parse(cls, text: str) -> "ApiPrice":
        """From a text of the form "cached,input,output". Raises ValueError for any other text."""
        amounts = text.split(",")
        if len(amounts) != len(PAID_KINDS):
            raise ValueError(
                f"api_price={text!r}: three amounts are accepted, {','.join(PAID_KINDS)}, in dollars for a "
                "million tokens"
            )
        dollars = {}
        for kind, text_of_kind in zip(PAID_KINDS, amounts, strict=True):
            dollars[kind] = amount(f"api_price ({kind})", text_of_kind)
        return cls(**dollars)

    def of(self, tokens: Mapping[str, int]) -> Fraction:
        """The price of `tokens` (kind -> number of tokens), in dollars."""
        microdollars = (
            self.cached * tokens["cached"] + self.input * tokens["input"] + self.output * tokens["output"]
        )
        return microdollars / 10**6


@dataclass(frozen=True)
class Bill:
    """What a CostMeter has measured, from its start to the moment of `CostMeter.read`."""

    price: Price
    ns: Mapping[str, int]  # kind (PAID_KINDS and UNPAID_KINDS) -> nanoseconds; all the time since the start
    tokens: Mapping[str, int]  # kind (PAID_KINDS) -> number of tokens
    num_ended: int  # number of requests that have ended

    @property
    def total_ns(self) -> int:
        """All the time since the start, in nanoseconds."""
        return sum(self.ns.values())

    @property
    def total(self) -> Fraction:
        """The price of all the time, in dollars."""
        return self.price.of(self.total_ns)

    @property
    def utilization(self) -> float:
        """The share of the time that requests pay for, from 0 to 1; 0 before any time has passed."""
        if not self.total_ns:
            return 0.0
        return sum(self.ns[kind] for kind in PAID_KINDS) / self.total_ns

    @property
    def per_output_token(self) -> Fraction | None:
        """The total in dollars, with idle time, per output token. None if there is no output token yet."""
        return self.total / self.tokens["output"] if self.tokens["output"] else None

    def per_token(self, kind: str) -> Fraction | None:
        """The mean price that requests paid per token of this kind, in dollars. None without such tokens."""
        return self.price.of(self.ns[kind]) / self.tokens[kind] if self.tokens[kind] else None

    def cents(self) -> dict[str, int]:
        """kind -> whole cents. The cents of all kinds add up to the total, rounded to cents."""
        total = math.floor(self.total * 100 + Fraction(1, 2))
        return dict(zip(self.ns, share_out(total, list(self.ns.values())), strict=True))


def money(dollars: Fraction | None) -> str:
    """Dollars as text: to the cent from one dollar on, else to three significant digits; "–" for None."""
    if dollars is None:
        return "–"
    if not dollars:
        return "$0"
    rounded = float(f"{float(dollars):.3g}")  # 0.9996 becomes 1
    if rounded >= 1:
        return f"${float(dollars):,.2f}"
    decimals = 2 - math.floor(math.log10(rounded))  # two more digits after the first that is not 0
    return f"${rounded:.{decimals}f}"
