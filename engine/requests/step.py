"""One step between launch and landing: its record, its requests, and its result. Part 6.

At the launch, the record (`Batch`) goes to an executor, and the requests stay with the engine. The landing
waits for the result.
"""

from dataclasses import dataclass
from typing import Protocol

from engine.decoding.outputs import Logprobs, TokenLogprobs
from engine.requests.batch import Batch
from engine.requests.request import Request


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step computed. Each list has an entry for each of the S sequences of the batch."""

    tokens: list[list[int]]  # [S]: new tokens; none in an incomplete prompt, several with drafts (Part 16)
    drafts: list[list[int]] | None = None  # [S]: proposed tokens to verify in the next step (Part 16)
    logprobs: list[list[TokenLogprobs]] | None = None  # [S]: of each new token (Part 10)
    prompt_logprobs: list[Logprobs] | None = None  # [S]: of the prompt tokens in this step (Part 10)
    counters: dict[str, float] | None = None  # what capabilities counted, by name, for `StepRecord`


class Pending(Protocol):
    """A submitted step."""

    def result(self) -> StepResult:
        """Wait for the device, and return what the step computed. Raises any error of the step."""


@dataclass(slots=True)
class Step:
    """A scheduled step. Times are seconds of the monotonic clock."""

    batch: Batch
    requests: tuple[Request, ...]  # [S]
    pending: Pending | None = None  # None before the submission, and if the submission failed with `error`
    error: Exception | None = None
    start: float = 0.0  # when its scheduling began
    schedule_end: float = 0.0  # when its scheduling ended
    overlapped: bool = False  # whether the next step is scheduled before this step has landed (Part 13)

    def result(self) -> StepResult:
        """Wait for the step's result. Raises the error of the submission or of the step, if there was one."""
        if self.pending is None:
            raise self.error or RuntimeError("the step was never submitted")
        return self.pending.result()

    def sampled_requests(self) -> list[Request]:
        """The requests that get a new token from this step: those whose prompt is complete after the step."""
        counts = self.batch.rows.chosen_counts
        return [request for request, count in zip(self.requests, counts, strict=True) if count]
