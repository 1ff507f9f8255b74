"""One request on its way through the engine. Part 6.

All of the engine reads a `Request`. Once it is queued, only the thread that makes the steps writes it. The
scheduler sets `state`, `rank`, `num_computed_tokens` and `draft_ids`, counts cached tokens and preemptions,
and removes what a preemption or a failed step has lost. The code in engine/core/ appends tokens and log
probabilities, and notes why a request failed; beam search also sets `parent` to None (Extension B). A
`Request` has the fields of all parts; the comment of a later part's field names the part.
"""

import enum
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from engine.decoding.outputs import Logprobs, RequestStats, TokenLogprobs
from engine.decoding.params import SamplingParams
from engine.decoding.sampling_state import SamplingState
from engine.decoding.stopping import GrowingOutput
from engine.requests.batch import PLACEHOLDER


class State(enum.Enum):
    """The state of a request. A preempted request returns from RUNNING to WAITING."""

    WAITING = "waiting"  # in the queue: new, or preempted
    RUNNING = "running"  # holds memory in the cache
    FINISHED = "finished"  # stopped, aborted or failed


def error_text(error: BaseException) -> str:
    """The error as users see it: "type: message"."""
    return f"{type(error).__name__}: {error}"


class Constraint(Protocol):
    """What the output of one request must fit (Extension B)."""

    @property
    def why_no_token(self) -> str:
        """Why a row may have allowed no token, for an error message."""

    def masks(self, drafts: Sequence[int]) -> list[np.ndarray]:
        """The masks (`Draw.mask`) for the token after the output, and for the token after each draft, up to
        the first draft that does not fit.
        """


@dataclass(eq=False, slots=True)  # compared by identity: two requests are never equal
class Request:
    """A prompt and the output that continues it.

    Prompt and output share one list, `token_ids`, because the scheduler treats their tokens alike: the keys
    and values of the first `num_computed_tokens` tokens are computed, and those of the other tokens are not.
    """

    id: str  # unique; each of n > 1 samples has its own id
    request_id: str  # the id of the user's request, which its n samples share
    token_ids: list[int]  # prompt, then output
    num_prompt_tokens: int
    params: SamplingParams
    output: GrowingOutput  # text, stop checks, finish reason
    sampling: SamplingState
    priority: int = 0  # a lower number goes first
    # The adapter's key once the request is queued, and before that the name that the user gave (Part 18).
    adapter: str | None = None
    cache_salt: str | None = None  # requests with different salts share no cached prefix (Part 12)
    trace_headers: Mapping[str, str] | None = None  # W3C's trace context, of which the request is a part
    constraint: Constraint | None = None  # None: any output fits (Extension B)
    parent: "Request | None" = None  # the first of n > 1 samples, whose prompt the others may share (Part 12)
    state: State = State.WAITING
    # The request's order in the queue, by priority and time, then by arrival: the lowest rank goes first.
    rank: tuple[float, int] = (0.0, 0)
    num_computed_tokens: int = 0  # tokens whose keys and values are in the cache, or will be after this step
    num_cached_tokens: int = 0  # tokens that the cache had when the request was first admitted (Part 12)
    num_preemptions: int = 0
    num_output_placeholders: int = 0  # tokens at the end of token_ids that are still on the device (Part 13)
    draft_ids: list[int] = field(default_factory=list)  # proposed tokens, not yet confirmed (Part 16)
    stats: RequestStats = field(default_factory=lambda: RequestStats(arrival=time.perf_counter()))
    # Log probabilities (Part 10): empty or None if the request asks for none.
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of each output token
    text_offsets: list[int] = field(default_factory=list)  # of each output token: where its text begins
    cumulative_logprob: float | None = None  # the sum over the output tokens
    prompt_logprobs: Logprobs = field(default_factory=list)  # of each token of the prompt
    error: str | None = None  # why the request failed, or None
    error_field: str | None = None  # the user's field that made it fail, if one did
    is_scored: bool = field(init=False)  # whether log probabilities of output or prompt are requested

    def __post_init__(self) -> None:
        params = self.params
        self.is_scored = params.logprobs is not None or params.prompt_logprobs is not None

    @property
    def num_tokens_to_compute(self) -> int:
        """The number of tokens and drafts whose keys and values are not computed yet.

        Tokens of the prompt and of the output count alike: there is no prefill or decode phase.
        """
        return len(self.token_ids) + len(self.draft_ids) - self.num_computed_tokens

    @property
    def wants_every_row(self) -> bool:
        """Whether the logits of every prompt token are needed, for prompt log probabilities (Part 10).

        If so, a cached prefix must be computed again (Part 12). Only the first of n samples needs these
        logits, and the other samples share its log probabilities.
        """
        return self.params.prompt_logprobs is not None and self.parent is None

    def add_placeholder(self) -> None:
        """Append PLACEHOLDER for a token that is chosen but not read yet (Part 13).

        With the placeholder, the next step can be scheduled. The last token that the output may have gets no
        placeholder, because no step follows it.
        """
        if len(self.output.token_ids) + self.num_output_placeholders + 1 < self.output.limit:
            self.token_ids.append(PLACEHOLDER)
            self.num_output_placeholders += 1

    def confirm(self, token_id: int, now: float) -> bool:
        """Store an output token that was read at `now`, in seconds of the monotonic clock.

        The token replaces the oldest placeholder, or is appended if there is none. Returns True if the
        output has ended.
        """
        if self.num_output_placeholders:
            self.token_ids[-self.num_output_placeholders] = token_id
            self.num_output_placeholders -= 1
        else:
            self.token_ids.append(token_id)
        self.stats.token_times.append(now)
        return self.output.append(token_id)

    def drop_placeholders(self) -> None:
        """Remove all placeholders, after their tokens are lost, for example because a step failed."""
        if self.num_output_placeholders:
            del self.token_ids[-self.num_output_placeholders :]
            self.num_output_placeholders = 0
