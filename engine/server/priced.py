"""What an answer has cost, in its `usage`: an extension of OpenAI's shape. Part 19.

Promises that `cost` covers all prompts and choices of the answer, whole or streamed, and stands there only
where a meter has an account of each. Source of the name: OpenRouter's `usage.cost`.
"""

from collections.abc import Sequence
from fractions import Fraction

from pydantic import BaseModel

from engine.decoding.outputs import RequestOutput
from engine.server.protocol import Completions
from engine.telemetry.bill import PAID, ApiPrice, Price


def priced(shape: type[Completions], price: Price, api_price: ApiPrice | None = None) -> type[Completions]:
    """`shape`, completions or chats, whose usage also says what the answer has cost."""

    class Priced(shape):
        def usage(self, body: BaseModel, outputs: Sequence[RequestOutput]) -> dict:
            """`cost` in dollars; in `cost_details` its parts, and the device's nanoseconds it comes from."""
            usage = super().usage(body, outputs)
            accounts = [output.stats and output.stats.account for output in outputs]
            if None in accounts:
                return usage
            ns = {kind: sum(account.ns[kind] for account in accounts) for kind in PAID}
            tokens = {kind: sum(account.tokens[kind] for account in accounts) for kind in PAID}
            whole = sum(ns.values())
            details = {"currency": "USD", "device_ns": whole}
            details |= {f"{kind}_cost": _dollars(price.of(part)) for kind, part in ns.items()}
            if api_price:
                details["api_cost"] = _dollars(api_price.of(tokens))
            found = sum(output.num_cached_tokens or 0 for output in outputs)
            return usage | {
                "prompt_tokens_details": {"cached_tokens": found},
                "cost": _dollars(price.of(whole)),
                "cost_details": details,
            }

    return Priced


def _dollars(exact: Fraction) -> float:
    return round(float(exact), 12)
