"""One step on its way: the record that was sent, the requests that stay, and what came back. Part 6."""

from dataclasses import dataclass
from typing import Protocol

from engine.decoding.outputs import Logprobs, TokenLogprobs
from engine.requests.batch import Batch
from engine.requests.request import Request


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step found, by sequence of its batch."""

    tokens: list[list[int]]  # [S]: new ones: none for an incomplete prompt, several with drafts (Part 16)
    drafts: list[list[int]] | None = None  # proposals to verify in the next step (Part 16)
    logprobs: list[list[TokenLogprobs]] | None = None  # of each new token, by sequence (Part 10)
    prompt_logprobs: list[Logprobs] | None = None  # of the prompt tokens in this step, by sequence (Part 10)
    counters: dict[str, float] | None = None  # for the step's record: what a capability has to tell of it


class Pending(Protocol):
    """A step under way."""

    def result(self) -> StepResult:
        """What the step found: the one place that waits for the device. Raises what the step raised."""


@dataclass(slots=True)
class Step:
    """A step between its launch and its landing. Times are seconds of the monotonic clock."""

    batch: Batch
    requests: tuple[Request, ...]  # [S]: they stay with the engine
    pending: Pending | None = None  # None: not submitted, or it failed there, with `error`
    error: Exception | None = None
    start: float = 0.0  # when scheduling began
    scheduled: float = 0.0  # and when it was done
    overtaken: bool = False  # the next one is scheduled before this one has landed (Part 13)

    def result(self) -> StepResult:
        """Waits for it. Raises what went wrong, at its submission or later."""
        if self.pending is None:
            raise self.error or RuntimeError("the step was never submitted")
        return self.pending.result()

    def choosing(self) -> list[Request]:
        """Those that get a token from this step: not those inside their prompts."""
        return [
            request for request, count in zip(self.requests, self.batch.rows.counts, strict=True) if count
        ]
