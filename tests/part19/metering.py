"""A meter on a clock of its own, and requests and steps made by hand."""

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from types import SimpleNamespace

from engine.decoding.outputs import RequestStats
from engine.requests.listeners import Listeners, StepRecord
from engine.telemetry.bill import Price
from engine.telemetry.cost import CostMeter
from engine.telemetry.shares import Weights

DOLLAR_A_SECOND = Price(Fraction(3600))
EVEN = Weights(input=1, output=1, held=0)  # a token is a token


class Loud(Listeners):
    """Listeners whose exceptions a test sees."""

    def tell(self, event: Callable, *details: object) -> None:
        for listener in self._listeners:
            getattr(listener, event.__name__)(*details)


@dataclass
class Clock:
    """Seconds, as a test sets them."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(eq=False)
class Asked:
    """A request as the meter sees it."""

    id: str
    num_prompt_tokens: int = 10
    request_id: str = ""
    num_output_placeholders: int = 0
    computed: int = 0
    token_ids: list[int] = field(default_factory=list)
    stats: RequestStats = field(default_factory=lambda: RequestStats(0.0))
    output: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(finish_reason=None))

    def __post_init__(self) -> None:
        self.request_id = self.request_id or self.id
        self.token_ids = self.token_ids or [0] * self.num_prompt_tokens


class Played:
    """A meter, and the events of an engine that a test plays to it. Times are whole seconds."""

    def __init__(self, weights: Weights = EVEN) -> None:
        self.clock = Clock()
        self.meter = CostMeter(DOLLAR_A_SECOND, weights, clock=self.clock)
        self.steps = 0

    def arrive(self, at: float, *requests: Asked) -> None:
        self.clock.now = at
        for request in requests:
            self.meter.on_arrival(request)

    def step(
        self,
        start: float,
        end: float,
        work: dict[Asked, int],
        error: str | None = None,
        told_at: float | None = None,
    ) -> None:
        """So many tokens of each; whoever has its prompt behind it says one, unless the step failed. The
        meter is told at `end` unless said.
        """
        self.clock.now, self.steps = end if told_at is None else told_at, self.steps + 1
        held = []
        for request, tokens in work.items():
            held.append(request.computed + tokens)
            if error is None:
                request.computed = held[-1]
                if request.computed >= len(request.token_ids):
                    request.token_ids.append(0)
                    request.stats.token_times.append(end)
        self.meter.on_step(
            StepRecord(
                number=self.steps,
                start=start,
                end=end,
                schedule_seconds=0.0,
                execute_seconds=end - start,
                request_ids=tuple(request.id for request in work),
                tokens_computed=tuple(work.values()),
                tokens_cached=(0,) * len(work),
                tokens_held=tuple(held),
                num_running=len(work),
                num_waiting=0,
                error=error,
            )
        )

    def finish(self, at: float, request: Asked, reason: str = "length") -> None:
        self.clock.now = at
        request.output.finish_reason = reason
        self.meter.on_finish(request)

    def seconds(self, at: float) -> dict[str, float]:
        """By kind, what is not 0; a sum that is not the time since the start is an error."""
        self.clock.now = at
        bill = self.meter.read()
        assert bill.total_ns == round(at * 1e9), (
            f"{bill.total_ns / 1e9} s are on the bill, and {at} s have passed: every nanosecond once"
        )
        return {kind: ns / 1e9 for kind, ns in bill.ns.items() if ns}


def paid(request: Asked) -> dict[str, float]:
    """Seconds on the request's account, by kind, but those that are 0."""
    return {kind: ns / 1e9 for kind, ns in request.stats.account.ns.items() if ns}
