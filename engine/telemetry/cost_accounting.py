"""Cost accounting as a command line sets it up: a meter, its numbers on the dashboard, a log. Part 19.

`CostAccounting.parse` checks the command line before a model is loaded. Promises that the lines of the log
add up to the bill once `end` was called.
"""

import re
from dataclasses import dataclass

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
    meter: CostMeter | None = None  # None until `begin`

    @classmethod
    def parse(
        cls,
        price_per_hour: str | None,
        api_price: str | None = None,
        cost_log: str | None = None,
        cost_weights: str | None = None,
    ) -> "CostAccounting | None":
        """From the texts of a command line; None if there is no price, because nothing is metered then.

        price_per_hour: see `Price.parse`. api_price: see `ApiPrice.parse`. cost_log: the path of the log.
        cost_weights: see `parse_weights`.

        Raises ValueError if a text is not accepted, if the log cannot be opened, or if another text is given
        without a price.
        """
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
        """Start to meter `engine`, and add the cost to `metrics`. Returns the meter."""
        self.meter = CostMeter(self.price, self.weights, self.api_price)
        if self.log:
            self.meter.closed.append(self.log.add)
        engine.listeners.add(self.meter)
        CostMetrics(self.meter, metrics)
        return self.meter

    def end(self) -> Bill:
        """The bill since `begin`. Also writes the last lines of the log, and closes the log."""
        assert self.meter is not None, "nothing has been metered: begin comes first"
        bill = self.meter.read()
        if self.log:
            self.log.close(bill, self.meter.unfinished())
        return bill


def parse_weights(text: str) -> Weights:
    """From a text of the form "input,output,held", whole nanoseconds. Raises ValueError for other texts, and
    for a weight out of range.
    """
    numbers = re.fullmatch(r"\s*([0-9]{1,10})\s*,\s*([0-9]{1,10})\s*,\s*([0-9]{1,10})\s*", text)
    if numbers is None:
        raise ValueError(f"cost_weights={text!r}: whole nanoseconds are accepted, as input,output,held")
    return Weights(input=int(numbers[1]), output=int(numbers[2]), held=int(numbers[3]))
