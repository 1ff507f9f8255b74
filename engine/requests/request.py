"""One request on its way through the engine. Part 6.

A record that everyone reads and few write: the scheduler moves `state` and `num_computed_tokens`, the engine
appends tokens. It carries every field the finished engine needs, from the first day.
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


@dataclass(eq=False, slots=True)  # a request is itself: equal to no other
class Request:
    """A prompt being continued.

    The tokens are one list, prompt and output, because to the scheduler they are the same thing: tokens whose
    keys and values are computed already (the first `num_computed_tokens`) or are not yet.
    """

    id: str  # unique: of n > 1 samples, each has its own
    request_id: str  # what the user asked for, shared by its samples
    token_ids: list[int]  # prompt, then output
    num_prompt_tokens: int
    params: SamplingParams
    output: GrowingOutput  # text, stop checks, finish reason
    sampling: SamplingState
    priority: int = 0  # lower goes first
    adapter: str | None = None  # its key, once the request is queued; before, what was asked for (Part 18)
    cache_salt: str | None = None  # requests with different salts share no cached prefix (Part 12)
    parent: "Request | None" = None  # of n > 1 samples, the first: they may share its prompt (Part 12)
    state: State = State.WAITING
    rank: tuple[float, int] = (0.0, 0)  # its place in the queue, given by the scheduler: lowest goes first
    num_computed_tokens: int = 0  # tokens whose keys and values are in the cache, or will be after this step
    num_cached_tokens: int = 0  # of these, how many the cache had at the start (Part 12)
    num_preemptions: int = 0
    num_expected: int = 0  # the last tokens that are placeholders: chosen, still on the device (Part 13)
    draft_ids: list[int] = field(default_factory=list)  # proposed, not yet confirmed (Part 16)
    stats: RequestStats = field(default_factory=lambda: RequestStats(arrival=time.perf_counter()))
    logprobs: list[TokenLogprobs] = field(
        default_factory=list
    )  # of the output tokens, if asked for (Part 10)
    text_offsets: list[int] = field(default_factory=list)  # with logprobs: where in the text each begins
    cumulative_logprob: float | None = None
    prompt_logprobs: Logprobs = field(default_factory=list)
    error: str | None = None
    is_scored: bool = field(init=False)  # log probabilities are asked for, of the output or the prompt

    def __post_init__(self) -> None:
        params = self.params
        self.is_scored = params.logprobs is not None or params.prompt_logprobs is not None

    @property
    def num_tokens_to_compute(self) -> int:
        """The whole of scheduling: computed tokens catch up with known ones. There is no prefill or decode
        phase.
        """
        return len(self.token_ids) + len(self.draft_ids) - self.num_computed_tokens

    @property
    def wants_every_row(self) -> bool:
        """Its prompt's logits are asked for, so a cached prefix must not be taken as computed (Part 12). Of n
        samples, the first finds them for all.
        """
        return self.params.prompt_logprobs is not None and self.parent is None

    def expect(self) -> None:
        """A token is on its way: a placeholder (-1) takes its place, so that the next step can be scheduled
        before this one's result is read (Part 13). The output's last possible token has no next step.
        """
        if len(self.output.token_ids) + self.num_expected + 1 < self.output.limit:
            self.token_ids.append(PLACEHOLDER)
            self.num_expected += 1

    def confirm(self, token_id: int, now: float) -> bool:
        """Take an output token that has come, at the oldest placeholder or at the end; True when the request
        is finished by it.
        """
        if self.num_expected:
            self.token_ids[-self.num_expected] = token_id
            self.num_expected -= 1
        else:
            self.token_ids.append(token_id)
        self.stats.token_times.append(now)
        return self.output.append(token_id)

    def withdraw(self) -> None:
        """Nothing that was expected will come: the placeholders go."""
        if self.num_expected:
            del self.token_ids[-self.num_expected :]
            self.num_expected = 0
