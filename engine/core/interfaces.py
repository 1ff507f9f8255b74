"""The interfaces of what an `LLMEngine` gets beside its scheduler and its executor. Part 6.

Later parts hand in objects and functions that satisfy these interfaces, and the engine calls them. The engine
does not know what they do.
"""

from collections.abc import Callable
from typing import Any, Protocol

from engine.decoding.params import SamplingParams
from engine.requests.batch import Batch
from engine.requests.request import Request
from engine.requests.step import Step, StepResult
from engine.requests.work import SlowWork

# A step that failed, and its error -> the requests that fail with it. The others of the step run again.
Recover = Callable[[Step, Exception], list[Request]]


class Preparation(Protocol):
    """What a capability does with a request before it is queued. Any thread may call its methods."""

    def slow_work(self, params: SamplingParams) -> SlowWork | None:
        """Work that may take longer than a step, and that `prepare` does if nobody has done it before; None
        if there is none.
        """

    def prepare(self, samples: list[Request]) -> None:
        """Add what the capability needs to the samples of a request that has passed all other checks. Raises
        ParameterError if the request is refused.
        """


class Capability(Protocol):
    """Hooks around each step, on the host: speculation (Part 16), grammars (Extension B).

    Capabilities are called in the engine's order, and each gets what the capability before it returned. If
    `before_submit` or `after_result` raises, the step has failed.
    """

    def before_submit(self, step: Step) -> Batch:
        """Return the record to submit: `step.batch`, or a copy of `step.batch` with other draws.

        Called once for each step, after the step was scheduled and before it is submitted. Must not change
        the step or its requests.
        """

    def must_land_first(self, step: Step) -> bool:
        """Whether `step`, which is in flight, must land before the next step is scheduled, because the next
        step needs its tokens. Called by an engine that runs one step ahead (Part 13). Must change nothing.
        """

    def after_result(self, step: Step, result: StepResult) -> StepResult:
        """Return the result to use: `result`, or one with other tokens, log probabilities, drafts, counters.

        Called once for each step that did not fail, after its result was read and before its tokens are
        appended. May change the capability's own state, and may reserve memory for drafts.
        """


class Adapters(Protocol):
    """The adapters that requests may ask for (Part 18)."""

    def key(self, adapter: Any) -> str:
        """The name by which scheduler and cache know the adapter that a request asks for.

        The thread that steps calls this when the request is queued. Raises ParameterError if the adapter is
        refused.
        """
