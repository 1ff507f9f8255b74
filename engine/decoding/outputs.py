"""What a user gets back: vLLM's RequestOutput and CompletionOutput, with every field from the first day.

Records only. A field that no part has filled yet is None. Part 2.
"""

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class Logprob:
    """One candidate at one place (filled from Part 10 on)."""

    logprob: float  # natural logarithm of the probability
    rank: int  # 1 is the most likely
    decoded_token: str


Logprobs = list[dict[int, Logprob] | None]


@dataclass
class CompletionOutput:
    """One continuation of a prompt."""

    index: int  # which of the n samples
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None  # None while it runs
    stop_reason: int | str | None = None  # the stop token or stop string; None for end of sequence
    cumulative_logprob: float | None = None
    logprobs: Logprobs | None = None


@dataclass
class RequestStats:
    """When things happened, in seconds of a monotonic clock."""

    arrival: float
    token_times: list[float] = field(default_factory=list)  # when each output token was known

    @property
    def time_to_first_token(self) -> float:
        """Seconds from arrival to the first token: mostly reading the prompt (prefill)."""
        return self.token_times[0] - self.arrival

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second, from arrival to the last of them."""
        return len(self.token_times) / (self.token_times[-1] - self.arrival)

    @property
    def time_per_output_token(self) -> float:
        """Mean seconds between output tokens, the first one's wait left out; 0 for a single token."""
        gaps = len(self.token_times) - 1
        return (self.token_times[-1] - self.token_times[0]) / gaps if gaps else 0.0


@dataclass
class RequestOutput:
    """All there is to say about one request, so far or finished."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: Logprobs | None = None
    num_cached_tokens: int | None = None  # prompt tokens found in a cache (Part 12)
    error: str | None = None  # why it failed, with finish reason "error" (Part 6)
    stats: RequestStats | None = None
