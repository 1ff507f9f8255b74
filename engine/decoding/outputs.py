"""The records that a user receives: vLLM's RequestOutput and CompletionOutput, with the fields of all parts.

A field that a later part fills is None before. Part 2.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from reprlib import Repr
from typing import Any, Literal, TypeVar, overload

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class Logprob:
    """The score of one token at one position of a sequence (from Part 10 on)."""

    logprob: float  # natural logarithm of the probability
    rank: int  # 1 is the most likely token
    decoded_token: str  # the token's text


TokenLogprobs = Mapping[int, Logprob]  # token id -> its score, at one position
Logprobs = list[TokenLogprobs | None]  # None for the first token of a prompt: no logits predict it


Item = TypeVar("Item")
_ABRIDGED = Repr()  # writes only the two ends of a long text, and only the first items of a long list
_ABRIDGED.maxstring = 100
_ABRIDGED.maxlist = 8
_ABRIDGED.maxother = 1000


class Snapshot(Sequence[Item]):
    """The items that a growing list has at this moment, without a copy.

    The list may only be appended to. A snapshot equals any list of the same items.
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


def short_repr(record: Any, *left_out: str) -> str:
    """A dataclass as text, without the fields whose names are in `left_out`. Long texts and lists are
    abridged, so a long output has a text about as long as a short one's.
    """
    shown: list[str] = []
    for spec in fields(record):
        if spec.name in left_out:
            continue
        value = getattr(record, spec.name)
        if isinstance(value, Snapshot):  # as a list, of which `Repr` writes the first items, and "..."
            value = value[: _ABRIDGED.maxlist + 1]
        shown.append(f"{spec.name}={_ABRIDGED.repr(value)}")
    return f"{type(record).__name__}({', '.join(shown)})"


@dataclass(slots=True, repr=False)
class CompletionOutput:
    """One continuation of a prompt."""

    index: int  # the number of the sample among the request's n samples, from 0
    text: str
    token_ids: Sequence[int]  # a list once the continuation is finished
    finish_reason: FinishReason | None = None  # None while the continuation grows
    # The stop token or the stop string. None for the tokenizer's EOS, and for other reasons than "stop".
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None  # the sum of the tokens' log probabilities, if requested
    logprobs: Sequence[TokenLogprobs] | None = None  # of each token, if requested
    text_offsets: Sequence[int] | None = None  # with logprobs: where each token begins in the decoded text

    def finished(self) -> bool:
        """Whether the continuation grows no more."""
        return self.finish_reason is not None

    def __repr__(self) -> str:
        return short_repr(self)


@dataclass(slots=True)
class RequestStats:
    """The times of a request's events, in seconds of a monotonic clock.

    The properties need at least one output token.
    """

    arrival: float
    token_times: list[float] = field(default_factory=list)  # when each output token was known
    account: object | None = None  # the request's cost, where cost is metered (Part 19)

    @property
    def time_to_first_token(self) -> float:
        """Seconds from arrival to the first token. Without a queue, most of them are the prefill's."""
        return self.token_times[0] - self.arrival

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second, from arrival to the last token."""
        return len(self.token_times) / (self.token_times[-1] - self.arrival)

    @property
    def time_per_output_token(self) -> float:
        """Mean seconds between two output tokens; 0 for a single token.

        The wait for the first is left out.
        """
        gaps = len(self.token_times) - 1
        return (self.token_times[-1] - self.token_times[0]) / gaps if gaps else 0.0


@dataclass(slots=True, repr=False)
class RequestOutput:
    """The state of one request, while it runs or after it has finished."""

    request_id: str
    prompt: str | None  # None if the prompt was given as token ids
    prompt_token_ids: Sequence[int]
    outputs: list[CompletionOutput]  # one for each of the n samples
    finished: bool
    prompt_logprobs: Logprobs | None = None  # of each prompt token, once the whole prompt is computed
    num_cached_tokens: int | None = None  # prompt tokens that were found in a cache (Part 12)
    error: str | None = None  # why the request failed; its finish reason is then "error" (Part 6)
    stats: RequestStats | None = None
    lora_request: Any = None  # the adapter as the user named it (Part 18)
    error_field: str | None = None  # the user's field that made it fail, if one did

    @property
    def metrics(self) -> RequestStats | None:
        """vLLM's name of `stats`."""
        return self.stats

    def __getitem__(self, name: Literal["text", "token_ids"]) -> Any:
        """The first continuation's text or token ids: nano-vllm's outputs are dicts with these two."""
        if name not in ("text", "token_ids"):
            raise KeyError(f"{name!r}: 'text' and 'token_ids' are accepted; other fields are attributes")
        return getattr(self.outputs[0], name)

    def __repr__(self) -> str:
        return short_repr(self, "stats", "error_field")
