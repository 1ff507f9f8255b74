"""The beams of a beam search, as requests of the engine: their scores, and which requests go on. Extension B.

Knows no scheduler and no cache: engine/core/beam_search.py runs the searches.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine.decoding.beam_search import BeamSearchSequence, BestAnswers, Continuation
from engine.decoding.logprobs import TokenScores
from engine.decoding.sampling import NO_TOKEN
from engine.requests.request import Request, State
from engine.requests.step import Step, StepResult


@dataclass(slots=True)
class Beam:
    """A running sequence."""

    request: Request
    score: float = 0.0  # the sum of the log probabilities of the answer so far
    logprobs: list[TokenScores] = field(default_factory=list)  # of each token of the answer so far
    next_logprobs: TokenScores | None = None  # of the next token; None until a step has computed them

    def computed_logprobs(self) -> TokenScores:
        """`next_logprobs`, once a step has computed them."""
        assert self.next_logprobs is not None, "a search goes on once a step has scored all of its beams"
        return self.next_logprobs


@dataclass(slots=True)
class Search:
    """The search for the best answers to one prompt."""

    beams: list[Beam]  # the best first; at the start the prompt alone; empty once the search has ended
    answers: BestAnswers[BeamSearchSequence]  # the best of those that have ended
    num_blocks: int  # the most blocks that the beams may hold together
    max_answer_tokens: int
    orig_prompt: dict[str, Any]  # as in `BeamSearchSequence`
    adapter: Any = None  # as the user named it
    num_tokens: int = 0  # the tokens of each beam's answer so far
    num_requests: int = 1  # the requests of this search so far; numbers the ids of forks

    def go_on(self, continuations: Sequence[Continuation]) -> list[Request]:
        """Replace the beams by these continuations of them. Returns the requests that are new.

        The best continuation of a beam goes on in the beam's own request, and keeps its blocks; each other
        one is a fork of it.
        """
        last_beams, self.beams = self.beams, []
        tokens_before = [list(beam.request.token_ids) for beam in last_beams]
        forks: list[Request] = []
        continued: set[int] = set()  # the indices of beams that go on in their own request
        for continuation in continuations:
            index, token_id = continuation.beam, continuation.token_id
            parent = last_beams[index]
            request = parent.request
            if index not in continued:
                continued.add(index)
                request.token_ids.append(token_id)
            else:
                request = _fork(request, [*tokens_before[index], token_id], self.num_requests)
                self.num_requests += 1
                forks.append(request)
            logprobs = [*parent.logprobs, parent.computed_logprobs()]
            self.beams.append(Beam(request, continuation.score, logprobs))
        return forks


def next_token_logprobs(step: Step, result: StepResult) -> dict[str, TokenScores]:
    """By request id: the log probabilities of the next token, for each request whose known tokens are all
    computed.

    Raises ArithmeticError if a request's logits are not finite numbers.
    """
    logprobs: dict[str, TokenScores] = {}
    for s, (request_id, tokens) in enumerate(zip(step.batch.ids, result.tokens, strict=True)):
        if NO_TOKEN in tokens:
            raise ArithmeticError("the model's logits are not finite numbers")
        if result.logprobs and result.logprobs[s]:
            of_next_token = result.logprobs[s][-1]
            assert isinstance(of_next_token, TokenScores)
            logprobs[request_id] = of_next_token
    return logprobs


def _fork(parent: Request, token_ids: list[int], number: int) -> Request:
    """A waiting request that continues the tokens of `parent`. `number` makes its id."""
    return replace(
        parent,
        id=f"{parent.request_id}/{number}",
        token_ids=token_ids,
        parent=parent,
        state=State.WAITING,
        num_computed_tokens=0,
        num_preemptions=0,
    )
