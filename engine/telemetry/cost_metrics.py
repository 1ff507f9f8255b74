"""A run's cost in dollars, as a panel of the dashboard and as counters for Prometheus. Part 19.

Adds to what Part 11 shows (`EngineMetrics.panels`, its registry), and changes nothing of it.
"""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from engine.telemetry.bill import PAID_KINDS, Bill, money
from engine.telemetry.cost import CostMeter
from engine.telemetry.metrics import ENGINE, LABEL_NAMES, EngineMetrics

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
# Bar colours by who pays: classes of dashboard.css.
REQUESTS_COLOUR, OPERATOR_COLOUR = "a", "b"


class CostMetrics:
    """Reads `meter` for the registry of `metrics`, and for a panel on its page."""

    def __init__(self, meter: CostMeter, metrics: EngineMetrics) -> None:
        """Registers itself with both."""
        self.meter, self.model_name = meter, metrics.model_name
        metrics.registry.register(self)
        metrics.panels.append(self.panel)

    def panel(self) -> dict:
        """What the page draws, all of it text: a row for each kind of time, with its share and dollars."""
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
        """In words: the price of a token, the share of time that requests pay for, the API's price if set."""
        per_token = bill.per_output_token
        token_note = f"{money(per_token)} per output token, idle time included"
        if per_token:
            token_note += f" ({money(per_token * 10**6)} a million)"
        notes = [token_note, f"{bill.utilization:.0%} of the time is paid by requests"]
        if self.meter.api_price:
            notes.append(f"the same tokens at the API's price: {money(self.meter.api_price.of(bill.tokens))}")
        return "; ".join(notes)

    def collect(self) -> Iterator[Metric]:
        """For the registry. Time under way is in no counter: it is given out later, to some other kind, and a
        counter may not go down.
        """
        bill = self.meter.read()
        label_values = (self.model_name, ENGINE)
        dollars = CounterMetricFamily(
            "ruvon:cost_dollars",
            "Dollars for the device, by what its time went to.",
            labels=(*LABEL_NAMES, "kind"),
        )
        for kind, ns in bill.ns.items():
            if kind != "under_way":
                dollars.add_metric((*label_values, kind), float(bill.price.of(ns)))
        yield dollars
        tokens = CounterMetricFamily(
            "ruvon:cost_tokens", "Tokens that requests pay for, by kind.", labels=(*LABEL_NAMES, "kind")
        )
        for kind, count in bill.tokens.items():
            tokens.add_metric((*label_values, kind), count)
        yield tokens
        if self.meter.api_price:
            api_dollars = CounterMetricFamily(
                "ruvon:api_cost_dollars", "Dollars for these tokens at the API's price.", labels=LABEL_NAMES
            )
            api_dollars.add_metric(label_values, float(self.meter.api_price.of(bill.tokens)))
            yield api_dollars
        per_hour = GaugeMetricFamily(
            "ruvon:price_dollars_per_hour", "Dollars for an hour of the device.", labels=LABEL_NAMES
        )
        per_hour.add_metric(label_values, float(bill.price.per_hour))
        yield per_hour
