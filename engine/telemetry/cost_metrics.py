"""A run's cost in dollars, as a panel of the dashboard and as metrics for Prometheus. Part 19.

`CostMetrics` adds the panel to Part 11's `EngineMetrics.panels`, and itself to the same metrics' registry.
"""

from collections.abc import Iterator

from prometheus_client.core import Metric

from engine.telemetry import families
from engine.telemetry.bill import PAID_KINDS, Bill, money
from engine.telemetry.cost import CostMeter
from engine.telemetry.metrics import EngineMetrics

KIND_TITLES = {
    "cached": "prompt tokens from the cache",
    "input": "prompt tokens",
    "output": "output tokens",
    "recomputed": "computed again, after a preemption",
    "failed": "steps that failed",
    "late": "for requests that had left",
    "idle": "idle",
    "under_way": "under way",
}
# Colours of the bars, by who pays. Both are CSS classes of dashboard.css.
REQUESTS_COLOUR, OPERATOR_COLOUR = "a", "b"


class CostMetrics:
    """A collector and a panel that show the bill of `meter` as of the moment when they are read."""

    def __init__(self, meter: CostMeter, metrics: EngineMetrics) -> None:
        """Adds the collector to `metrics.registry`, and the panel to `metrics.panels`."""
        self.meter, self.model_name = meter, metrics.model_name
        metrics.registry.register(self)
        metrics.panels.append(self.panel)

    def panel(self) -> dict:
        """The panel for the dashboard: title, value, note, and a row for each kind of time.

        A row is [title of the kind, share of the time from 0 to 1, dollars as text, colour].
        """
        bill = self.meter.read()
        rows = []
        for kind, ns in bill.ns.items():
            if ns and kind != "under_way":
                colour = REQUESTS_COLOUR if kind in PAID_KINDS else OPERATOR_COLOUR
                rows.append([KIND_TITLES[kind], ns / bill.total_ns, money(bill.price.of(ns)), colour])
        return {
            "title": "What this run costs",
            "value": money(bill.total),
            "note": self._note(bill),
            "rows": rows,
        }

    def _note(self, bill: Bill) -> str:
        """A text: dollars per output token, the share of time that requests pay for, and the API's price."""
        per_token = bill.per_output_token
        token_note = f"{money(per_token)} per output token, idle time included"
        if per_token:
            token_note += f" ({money(per_token * 10**6)} a million)"
        notes = [token_note, f"{bill.utilization:.0%} of the time is paid by requests"]
        if self.meter.api_price:
            notes.append(f"the same tokens at the API's price: {money(self.meter.api_price.of(bill.tokens))}")
        return "; ".join(notes)

    def collect(self) -> Iterator[Metric]:
        """The metrics, for the registry.

        No counter includes the kind `under_way`: this time is charged to another kind later, and a counter
        must not go down.
        """
        bill, model_name = self.meter.read(), self.model_name
        dollars = {kind: float(bill.price.of(ns)) for kind, ns in bill.ns.items() if kind != "under_way"}
        yield families.counter_by(
            "kind",
            "ruvon:cost_dollars",
            "Dollars for the device, by what its time went to.",
            model_name,
            dollars,
        )
        yield families.counter_by(
            "kind", "ruvon:cost_tokens", "Tokens that requests pay for, by kind.", model_name, bill.tokens
        )
        if self.meter.api_price:
            api_dollars = float(self.meter.api_price.of(bill.tokens))
            yield families.counter(
                "ruvon:api_cost_dollars",
                "Dollars for these tokens at the API's price.",
                model_name,
                api_dollars,
            )
        per_hour = float(bill.price.per_hour)
        yield families.gauge(
            "ruvon:price_dollars_per_hour", "Dollars for an hour of the device.", model_name, per_hour
        )
