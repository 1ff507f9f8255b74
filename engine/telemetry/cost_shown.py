"""The cost of a run where people look: a panel on the dashboard, counters for Prometheus, a log. Part 19.

Adds to what Part 11 shows (`EngineMetrics.panels`, its registry), and changes nothing of it. `Costs` is what
an operator asked for, from the words of a command line to the last line of the log.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from engine.core.llm_engine import LLMEngine
from engine.telemetry.bill import PAID, ApiPrice, Bill, Price, money
from engine.telemetry.cost import CostMeter
from engine.telemetry.cost_log import CostLog
from engine.telemetry.metrics import ENGINE, LABELS, EngineMetrics
from engine.telemetry.shares import Weights

LABEL = {
    "cached": "prompt tokens from the cache",
    "input": "prompt tokens",
    "output": "output tokens",
    "recomputed": "computed again, after a preemption",
    "failed": "steps that failed",
    "late": "for requests that had left",
    "idle": "idle",
    "under_way": "under way",
}


class CostShown:
    """A collector of the registry that `metrics` has, and a panel on its page."""

    def __init__(self, meter: CostMeter, metrics: EngineMetrics) -> None:
        self.meter, self.model_name = meter, metrics.model_name
        metrics.registry.register(self)
        metrics.panels.append(self.panel)

    def panel(self) -> dict:
        """What the page draws; every word of it is text."""
        bill = self.meter.read()
        return {
            "title": "What this run costs",
            "value": money(bill.total),
            "note": self._note(bill),
            "rows": [
                [LABEL[kind], ns / bill.total_ns, money(bill.price.of(ns)), "a" if kind in PAID else "b"]
                for kind, ns in bill.ns.items()
                if ns and kind != "under_way"
            ],
        }

    def _note(self, bill: Bill) -> str:
        """In words: the price of a token, what of the time was used, and the comparison if there is one."""
        each = bill.per_output_token
        words = [f"{money(each)} per output token, idle time included"]
        if each:
            words[0] += f" ({money(each * 10**6)} a million)"
        words.append(f"{bill.used:.0%} of the time is paid by requests")
        if self.meter.api_price:
            words.append(f"the same tokens at the API's price: {money(self.meter.api_price.of(bill.tokens))}")
        return "; ".join(words)

    def collect(self) -> Iterator[Metric]:
        """For the registry. What is under way is in no counter yet: a counter may not go down."""
        bill = self.meter.read()
        labels = (self.model_name, ENGINE)
        dollars = CounterMetricFamily(
            "ruvon:cost_dollars",
            "Dollars for the device, by what its time went to.",
            labels=(*LABELS, "kind"),
        )
        for kind, ns in bill.ns.items():
            if kind != "under_way":
                dollars.add_metric((*labels, kind), float(bill.price.of(ns)))
        yield dollars
        tokens = CounterMetricFamily(
            "ruvon:cost_tokens", "Tokens that requests pay for, by kind.", labels=(*LABELS, "kind")
        )
        for kind, number in bill.tokens.items():
            tokens.add_metric((*labels, kind), number)
        yield tokens
        if self.meter.api_price:
            api_dollars = CounterMetricFamily(
                "ruvon:api_cost_dollars", "Dollars for these tokens at the API's price.", labels=LABELS
            )
            api_dollars.add_metric(labels, float(self.meter.api_price.of(bill.tokens)))
            yield api_dollars
        per_hour = GaugeMetricFamily(
            "ruvon:price_dollars_per_hour", "Dollars for an hour of the device.", labels=LABELS
        )
        per_hour.add_metric(labels, float(bill.price.per_hour))
        yield per_hour


@dataclass
class Costs:
    """What is metered, compared and logged."""

    price: Price
    api_price: ApiPrice | None = None
    log: CostLog | None = None
    weights: Weights | None = None
    meter: CostMeter | None = None  # once it has begun

    @classmethod
    def parse(
        cls,
        price_per_hour: str | None,
        api_price: str | None = None,
        cost_log: str | None = None,
        cost_weights: str | None = None,
    ) -> "Costs | None":
        """From a command line's words; None: no price, so nothing is metered. Raises ValueError."""
        others = {"api_price": api_price, "cost_log": cost_log, "cost_weights": cost_weights}
        if price_per_hour is None:
            for name, value in others.items():
                if value is not None:
                    raise ValueError(f"{name}={value!r} needs price_per_hour; none is given")
            return None
        price = Price.parse(price_per_hour)
        compared = None if api_price is None else ApiPrice.parse(api_price)
        weights = None if cost_weights is None else parse_weights(cost_weights)
        log = None if cost_log is None else CostLog(cost_log, price, compared)
        return cls(price, compared, log, weights)

    def begin(self, engine: LLMEngine, metrics: EngineMetrics) -> CostMeter:
        """From here on the device's time costs."""
        self.meter = CostMeter(self.price, self.weights, self.api_price)
        if self.log:
            self.meter.closed.append(self.log.add)
        engine.listeners.add(self.meter)
        CostShown(self.meter, metrics)
        return self.meter

    def end(self) -> Bill:
        """The bill since `begin`; the log gets its last lines, with which it adds up to that."""
        assert self.meter is not None, "nothing has been metered: begin comes first"
        bill = self.meter.read()
        if self.log:
            self.log.close(bill, self.meter.unfinished())
        return bill


def parse_weights(text: str) -> Weights:
    """From "input,output,held". Raises ValueError."""
    names, numbers = [field.name for field in fields(Weights)], text.split(",")
    if len(numbers) != len(names) or not all(re.fullmatch("[0-9]{1,10}", n.strip()) for n in numbers):
        raise ValueError(f"cost_weights={text!r}: whole nanoseconds are accepted, as {','.join(names)}")
    return Weights(*map(int, numbers))
