"""Beam search: its parameters, which continuations go on, and which answers are kept. Extension B.

A beam is a sequence with a score, the sum of the log probabilities of its answer's tokens. In each step, every
beam has a continuation for each token of the vocabulary, and the best `beam_width` of all these go on. Promises
the sequences and the scores of Hugging Face's `generate(num_beams=…, do_sample=False)` with its default
`early_stopping=False`. Knows numbers only: no model, no cache, no text. engine/core/beam_search.py computes.

Where vLLM's `LLM.beam_search` has another rule than Hugging Face, the rule here is Hugging Face's:

| | here and in Hugging Face | in vLLM |
|---|---|---|
| what is ranked | all continuations together | as here |
| an end-of-sequence token ends an answer if | it is among the best `beam_width` continuations | it is among 2 · `beam_width` of its beam |
| score / length ** `length_penalty`: the length is | the answer's tokens, the end of sequence included | prompt and answer, without it |
| the search ends | when no running beam can be better than the worst kept answer, if it ended now | after `max_tokens` |
"""  # noqa: E501  # a table

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from engine.decoding.outputs import FinishReason, Logprob
from engine.decoding.params import ParameterError, refuse_unknown_names

MAX_PENALTY = 10.0  # a length of 100,000 to this power is a number that a float can hold


@refuse_unknown_names
@dataclass(slots=True)
class BeamSearchParams:
    """The parameters of one beam search, in the order of vLLM's.

    Raises ParameterError for a value of the wrong type or out of range, and TypeError for an unknown name.
    """

    beam_width: int  # how many beams go on after each step, and how many answers there are at the end
    max_tokens: int  # an answer's most tokens
    ignore_eos: bool = False  # continue after the model's end-of-sequence token
    # Only 0 and 1 are accepted, and give the same: the model's own log probabilities count, nothing is drawn.
    temperature: float = 0.0
    # An ended answer's score is divided by its length to this power: above 0 longer answers win more often.
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False  # keep the end-of-sequence token's text in the text
    structured_outputs: Any = None  # only None is accepted

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ParameterError(name, f"{name}={value!r}: a whole number of at least 1 is accepted")
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise ParameterError(name, f"{name}={getattr(self, name)!r}: true or false is accepted")
        if isinstance(self.temperature, bool) or self.temperature not in (0, 1):
            raise ParameterError(
                "temperature",
                f"temperature={self.temperature!r}: beam search draws nothing, and adds up the model's own "
                "log probabilities: 0 and 1 are accepted",
            )
        penalty = self.length_penalty
        is_number = isinstance(penalty, int | float) and not isinstance(penalty, bool)
        if not is_number or not -MAX_PENALTY <= penalty <= MAX_PENALTY:
            raise ParameterError(
                "length_penalty",
                f"length_penalty={penalty!r}: a number from {-MAX_PENALTY} to {MAX_PENALTY} is accepted",
            )
        if self.structured_outputs is not None:
            raise ParameterError(
                "structured_outputs",
                f"structured_outputs={self.structured_outputs!r}: beam search knows no grammar; None is "
                "accepted, and SamplingParams takes one",
            )


@dataclass(slots=True)
class BeamSearchSequence:
    """One answer of a beam search, with vLLM's names and `score`, by which the answers are in order."""

    orig_prompt: Mapping[str, Any]  # "prompt_token_ids", and "prompt" if the prompt was a text
    tokens: list[int]  # of prompt and answer, the end-of-sequence token included
    logprobs: list[Mapping[int, Logprob]]  # of each token of the answer: the likeliest tokens at its place
    lora_request: Any = None
    cum_logprob: float = 0.0  # the sum over the answer's tokens
    text: str | None = None  # of prompt and answer
    finish_reason: FinishReason | None = None  # "stop" or "length"
    stop_reason: int | str | None = None  # the token that ended the answer; None if the length did
    score: float = 0.0  # cum_logprob / length of the answer ** length_penalty


@dataclass(slots=True)
class BeamSearchOutput:
    """The best answers to one prompt, the best first: `beam_width`, if there are that many."""

    sequences: list[BeamSearchSequence]


class Continuation(NamedTuple):
    """A beam and a token behind it."""

    beam: int  # the beam's index
    token_id: int
    score: float  # the sum of the log probabilities of the answer's tokens, this token included


Likeliest = Sequence[tuple[int, float]]  # tokens that may follow a beam, and the log probability of each


def num_candidates(width: int, num_end_ids: int) -> int:
    """How many of a beam's likeliest tokens `best_continuations` needs: enough that `width` of them do not
    end the beam, even if its `num_end_ids` end-of-sequence tokens are among them. At least 2 · `width`, as in
    Hugging Face.
    """
    return width * max(2, 1 + num_end_ids)


def best_continuations(
    scores: Sequence[float], likeliest: Sequence[Likeliest], width: int, ends: Callable[[int], bool]
) -> tuple[list[Continuation], list[Continuation]]:
    """(those that go on, those that have ended), each with the best first.

    `scores`[n] are those of the n beams, `likeliest`[n] the tokens that may follow each, and `ends` says
    whether a token ends an answer. A continuation's score is its beam's score plus the log probability of its
    token; the length does not count here. All continuations of all beams are ranked together. Of those that
    do not end, the best `width` go on, so no beam is lost because others have ended. Those that end are kept
    if they are among the best `width` of all. Between equal scores, the earlier beam goes first, and then the
    token that stands earlier in `likeliest`.
    """
    ranked = [
        Continuation(beam, token_id, score + logprob)
        for beam, (score, tokens) in enumerate(zip(scores, likeliest, strict=True))
        for token_id, logprob in tokens
    ]
    ranked.sort(key=lambda continuation: continuation.score, reverse=True)  # equal scores keep their order
    going_on = [continuation for continuation in ranked if not ends(continuation.token_id)]
    ended = [continuation for continuation in ranked[:width] if ends(continuation.token_id)]
    return going_on[:width], ended


def penalized(score: float, num_tokens: int, length_penalty: float) -> float:
    """The score by which answers of different lengths are compared. `num_tokens`, at least 1, counts the
    tokens of the answer, the end-of-sequence token included.
    """
    return score / num_tokens**length_penalty


Answer = TypeVar("Answer")


@dataclass(slots=True)
class BestAnswers(Generic[Answer]):
    """The best `width` of the answers that have ended, in order."""

    width: int
    length_penalty: float
    kept: list[tuple[float, Answer]] = field(default_factory=list)  # (penalized score, answer), best first

    def add(self, score: float, num_tokens: int, answer: Answer) -> None:
        """Keep an answer of `num_tokens` tokens if it is among the best. It displaces no kept answer of the
        same penalized score.
        """
        self.kept.append((penalized(score, num_tokens, self.length_penalty), answer))
        self.kept.sort(key=lambda entry: entry[0], reverse=True)  # by score; equal scores keep their order
        del self.kept[self.width :]

    def may_improve(self, best_running: float, num_tokens: int) -> bool:
        """Whether a running beam may still become one of the best answers. `best_running` is the best beam's
        score after `num_tokens` tokens; if it is -inf, no beam can.

        This is Hugging Face's `early_stopping=False`: the beam counts as if it ended with its present score
        and length. It is exact for a `length_penalty` up to 0, and an estimate above, where a longer answer
        could still be better.
        """
        if len(self.kept) < self.width:
            return not math.isinf(best_running)
        worst_score, _ = self.kept[-1]
        return penalized(best_running, num_tokens, self.length_penalty) > worst_score
