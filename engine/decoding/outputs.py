"""What a user gets back: vLLM's RequestOutput and CompletionOutput, with every field from the first day.

Records only. A field that no part has filled yet is None. Part 2.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, TypeVar, overload

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class Logprob:
    """One candidate at one place (filled from Part 10 on)."""

    logprob: float  # natural logarithm of the probability
    rank: int  # 1 is the most likely
    decoded_token: str


TokenLogprobs = Mapping[int, Logprob]  # by token id, at one place
Logprobs = list[TokenLogprobs | None]  # None: nothing comes before the first token of a prompt


Item = TypeVar("Item")


class Snapshot(Sequence[Item]):
    """The items that a growing list has now, without a copy: the list only gets longer. Equal to any list of
    the same items.
    """

    __slots__ = ("_items", "_length")

    def __init__(self, items: list[Item]) -> None:
        self._items, self._length = items, len(items)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        if isinstance(index, slice):
            return [self._items[i] for i in range(self._length)[index]]
        return self._items[range(self._length)[index]]

    def __iter__(self) -> Iterator[Item]:
        return islice(self._items, self._length)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (list, Snapshot)) and list(self) == list(other)

    def __repr__(self) -> str:
        return repr(list(self))


@dataclass(slots=True)
class CompletionOutput:
    """One continuation of a prompt."""

    index: int  # which of the n samples
    text: str
    token_ids: Sequence[int]  # a list once it is finished
    finish_reason: FinishReason | None = None  # None while it runs
    stop_reason: int | str | None = None  # the stop token or stop string; None for end of sequence
    cumulative_logprob: float | None = None
    logprobs: Sequence[Mapping[int, Logprob]] | None = None  # of each token, if asked for
    text_offsets: Sequence[int] | None = None  # with logprobs: where each token begins in the text decoded


@dataclass(slots=True)
class RequestStats:
    """When things happened, in seconds of a monotonic clock."""

    arrival: float
    token_times: list[float] = field(default_factory=list)  # when each output token was known
    account: object | None = None  # what it has cost, where that is metered (Part 19)

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


@dataclass(slots=True)
class RequestOutput:
    """All there is to say about one request, so far or finished."""

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: Logprobs | None = None  # of each prompt token, once the whole prompt was read
    num_cached_tokens: int | None = None  # prompt tokens found in a cache (Part 12)
    error: str | None = None  # why it failed, with finish reason "error" (Part 6)
    stats: RequestStats | None = None
