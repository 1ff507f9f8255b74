"""The cost of an answer, in its `usage`: an extension of OpenAI's shape. Part 19.

Promises that `cost` covers all prompts and choices of an answer, whole or streamed. If one prompt was not
metered, the answer has no `cost`. OpenRouter's API uses the same name, `usage.cost`.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from engine.decoding.outputs import RequestOutput
from engine.telemetry.bill import PAID_KINDS, ApiPrice, Price
from engine.telemetry.cost import Account


def usage_cost(
    price: Price, api_price: ApiPrice | None = None
) -> Callable[[Sequence[RequestOutput]], dict[str, Any]]:
    """A function for `Completions.more_usage` (also of chats), which adds the cost of an answer's outputs.

    With `api_price`, the function also adds what the same tokens would cost at that API.
    """

    def cost_fields(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """`cost` in dollars, and `cost_details`: the cost by kind of token, and the device's nanoseconds. {}
        if an output was not metered.
        """
        accounts = []
        for output in outputs:
            account = _account(output)
            if account is None:
                return {}
            accounts.append(account)
        ns = {kind: sum(account.ns[kind] for account in accounts) for kind in PAID_KINDS}
        tokens = {kind: sum(account.tokens[kind] for account in accounts) for kind in PAID_KINDS}
        total_ns = sum(ns.values())
        details: dict[str, Any] = {"currency": "USD", "device_ns": total_ns}
        details |= {f"{kind}_cost": _dollars(price.of(ns[kind])) for kind in PAID_KINDS}
        if api_price:
            details["api_cost"] = _dollars(api_price.of(tokens))
        return {"cost": _dollars(price.of(total_ns)), "cost_details": details}

    return cost_fields


def _account(output: RequestOutput) -> Account | None:
    """The account of the output's request; None if the request was not metered."""
    if output.stats is None or not isinstance(output.stats.account, Account):
        return None
    return output.stats.account


def _dollars(amount: Fraction) -> float:
    """`amount` in dollars, rounded to 12 decimals as in the cost log."""
    return round(float(amount), 12)
