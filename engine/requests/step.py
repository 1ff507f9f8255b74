"""One step from its launch to its landing: its record, its requests, and its result. Part 6.

The record (`Batch`) goes to an executor; the requests stay with the engine. Landing waits for the result.
"""

from dataclasses import dataclass
from typing import Protocol

from engine.decoding.outputs import Logprobs, TokenLogprobs
from engine.requests.batch import Batch
from engine.requests.request import Request


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step computed. Lists are by sequence of its batch."""

    tokens: list[list[int]]  # [S]: new ones: none for an incomplete prompt, several with drafts (Part 16)
    drafts: list[list[int]] | None = None  # [S]: proposals to verify in the next step (Part 16)
    logprobs: list[list[TokenLogprobs]] | None = None  # [S]: of each new token (Part 10)
    prompt_logprobs: list[Logprobs] | None = None  # [S]: of the prompt tokens in this step (Part 10)
    counters: dict[str, float] | None = None  # by name: what capabilities counted, for `StepRecord`


class Pending(Protocol):
    """A submitted step."""

    def result(self) -> StepResult:
        """Wait for the device, and return what the step computed. Raises what the step raised."""


@dataclass(slots=True)
class Step:
    """A scheduled step. Times are seconds of the monotonic clock."""

    batch: Batch
    requests: tuple[Request, ...]  # [S]
    pending: Pending | None = None  # None: not submitted, or submitting it failed with `error`
    error: Exception | None = None
    start: float = 0.0  # when scheduling it began
    schedule_end: float = 0.0
    overlapped: bool = False  # the next step is scheduled before this one has landed (Part 13)

    def result(self) -> StepResult:
        """Wait for the step's result. Raises what went wrong, at its submission or later."""
        if self.pending is None:
            raise self.error or RuntimeError("the step was never submitted")
        return self.pending.result()

    def sampled_requests(self) -> list[Request]:
        """The requests that get a new token from this step: all whose prompt is complete by then."""
        return [
            request for request, count in zip(self.requests, self.batch.rows.counts, strict=True) if count
        ]
