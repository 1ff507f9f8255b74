"""One request on its way through the engine. Part 6.

Every part of the engine reads it; only the scheduler and the engine loop write it: the scheduler sets
`state`, `rank` and `num_computed_tokens`, the engine loop appends tokens. It has the fields of all parts from
the start; those of a later part name that part.
"""

import enum
import time
from dataclasses import dataclass, field

from engine.decoding.outputs import Logprobs, RequestStats, TokenLogprobs
from engine.decoding.params import SamplingParams
from engine.decoding.sampling import SamplingState
from engine.decoding.stopping import GrowingOutput
from engine.requests.batch import PLACEHOLDER


class State(enum.Enum):
    WAITING = "waiting"  # in the queue: new, or preempted
    RUNNING = "running"  # holds memory in the cache
    FINISHED = "finished"  # stopped, aborted or failed


@dataclass(eq=False, slots=True)  # compared by identity: two requests are never equal
class Request:
    """A prompt and the output that continues it.

    Both are in one list, `token_ids`, since the scheduler treats them alike: keys and values of the first
    `num_computed_tokens` are computed, those of the others are not yet.
    """

    id: str  # unique: of n > 1 samples, each has its own
    request_id: str  # of the user's request, shared by its samples
    token_ids: list[int]  # prompt, then output
    num_prompt_tokens: int
    params: SamplingParams
    output: GrowingOutput  # text, stop checks, finish reason
    sampling: SamplingState
    priority: int = 0  # lower goes first
    adapter: str | None = None  # its key, once the request is queued; before, as the user named it (Part 18)
    cache_salt: str | None = None  # requests with different salts share no cached prefix (Part 12)
    parent: "Request | None" = None  # of n > 1 samples, the first: they may share its prompt (Part 12)
    state: State = State.WAITING
    rank: tuple[float, int] = (0.0, 0)  # its order in the queue: lowest goes first
    num_computed_tokens: int = 0  # tokens whose keys and values are in the cache, or will be after this step
    num_cached_tokens: int = 0  # of these, how many the cache had when it was first admitted (Part 12)
    num_preemptions: int = 0
    num_output_placeholders: int = 0  # at the end of token_ids: chosen, but still on the device (Part 13)
    draft_ids: list[int] = field(default_factory=list)  # proposed, not yet confirmed (Part 16)
    stats: RequestStats = field(default_factory=lambda: RequestStats(arrival=time.perf_counter()))
    # Log probabilities (Part 10): empty or None where the request asks for none.
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of each output token
    text_offsets: list[int] = field(default_factory=list)  # of each: characters of the text before it
    cumulative_logprob: float | None = None  # the sum, over the output tokens
    prompt_logprobs: Logprobs = field(default_factory=list)  # of each token of the prompt
    error: str | None = None  # why it failed, if it did
    is_scored: bool = field(init=False)  # log probabilities are asked for, of the output or the prompt

    def __post_init__(self) -> None:
        params = self.params
        self.is_scored = params.logprobs is not None or params.prompt_logprobs is not None

    @property
    def num_tokens_to_compute(self) -> int:
        """Known tokens and drafts whose keys and values are not computed yet. Those of a prompt and of an
        output count alike: there is no prefill or decode phase.
        """
        return len(self.token_ids) + len(self.draft_ids) - self.num_computed_tokens

    @property
    def wants_every_row(self) -> bool:
        """Whether the logits of every prompt token are needed, for prompt log probabilities (Part 10): then a
        cached prefix must be computed again (Part 12). Of n samples, the first computes them for all.
        """
        return self.params.prompt_logprobs is not None and self.parent is None

    def add_placeholder(self) -> None:
        """Append PLACEHOLDER for a token that is chosen but not read yet, so that the next step can be
        scheduled (Part 13). Does nothing for the last token the output may have: no step follows it.
        """
        if len(self.output.token_ids) + self.num_output_placeholders + 1 < self.output.limit:
            self.token_ids.append(PLACEHOLDER)
            self.num_output_placeholders += 1

    def confirm(self, token_id: int, now: float) -> bool:
        """Store an output token that was read at `now` (seconds of the monotonic clock): in place of the
        oldest placeholder, or at the end. Returns whether the request has finished.
        """
        if self.num_output_placeholders:
            self.token_ids[-self.num_output_placeholders] = token_id
            self.num_output_placeholders -= 1
        else:
            self.token_ids.append(token_id)
        self.stats.token_times.append(now)
        return self.output.append(token_id)

    def drop_placeholders(self) -> None:
        """Remove all placeholders: the tokens they stand for will not come."""
        if self.num_output_placeholders:
            del self.token_ids[-self.num_output_placeholders :]
            self.num_output_placeholders = 0
