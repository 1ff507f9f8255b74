"""What an operator asks for with a price: a meter, its numbers on the dashboard, a log. Part 19.

Promises that what a command line says is checked before a model is loaded, and that the log's lines add up to
the bill once `end` was called.
"""

import re
from dataclasses import dataclass, fields

from engine.core.llm_engine import LLMEngine
from engine.telemetry.bill import ApiPrice, Bill, Price
from engine.telemetry.cost import CostMeter
from engine.telemetry.cost_log import CostLog
from engine.telemetry.cost_metrics import CostMetrics
from engine.telemetry.metrics import EngineMetrics
from engine.telemetry.shares import Weights


@dataclass
class CostAccounting:
    """The prices, the log and the meter of one server."""

    price: Price
    api_price: ApiPrice | None = None
    log: CostLog | None = None
    weights: Weights | None = None
    meter: CostMeter | None = None  # from `begin` on

    @classmethod
    def parse(
        cls,
        price_per_hour: str | None,
        api_price: str | None = None,
        cost_log: str | None = None,
        cost_weights: str | None = None,
    ) -> "CostAccounting | None":
        """From a command line's words; None without a price: nothing is metered. Raises ValueError."""
        if price_per_hour is None:
            others = {"api_price": api_price, "cost_log": cost_log, "cost_weights": cost_weights}
            for name, value in others.items():
                if value is not None:
                    raise ValueError(f"{name}={value!r} needs price_per_hour; none is given")
            return None
        price = Price.parse(price_per_hour)
        parsed_api_price = None if api_price is None else ApiPrice.parse(api_price)
        weights = None if cost_weights is None else parse_weights(cost_weights)
        log = None if cost_log is None else CostLog(cost_log, price, parsed_api_price)
        return cls(price, parsed_api_price, log, weights)

    def begin(self, engine: LLMEngine, metrics: EngineMetrics) -> CostMeter:
        """Meter `engine` from now on, and add the numbers to `metrics`. Returns the meter."""
        self.meter = CostMeter(self.price, self.weights, self.api_price)
        if self.log:
            self.meter.closed.append(self.log.add)
        engine.listeners.add(self.meter)
        CostMetrics(self.meter, metrics)
        return self.meter

    def end(self) -> Bill:
        """The bill since `begin`. The log gets its last lines and is closed."""
        assert self.meter is not None, "nothing has been metered: begin comes first"
        bill = self.meter.read()
        if self.log:
            self.log.close(bill, self.meter.unfinished())
        return bill


def parse_weights(text: str) -> Weights:
    """From "input,output,held", in nanoseconds. Raises ValueError."""
    names, numbers = [field.name for field in fields(Weights)], text.split(",")
    if len(numbers) != len(names) or not all(re.fullmatch("[0-9]{1,10}", n.strip()) for n in numbers):
        raise ValueError(f"cost_weights={text!r}: whole nanoseconds are accepted, as {','.join(names)}")
    return Weights(*map(int, numbers))
