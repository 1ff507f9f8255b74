"""The fake model in two steps, what its log probabilities ought to be, and engines that must not fail."""

from collections.abc import Sequence

from torch import Tensor

from engine.batch import Batch
from engine.llm_engine import LLMEngine
from tests.part06.fakes import FakeForward, fake_logits, run_to_end


class ScoringFake(FakeForward):
    """`hidden` are the logits already; `at_once` notes how many rows go through `logits` together."""

    def __init__(self, cache) -> None:
        super().__init__(cache)
        self.at_once: list[int] = []

    def hidden(self, batch: Batch) -> Tensor:
        return self(batch)

    def logits(self, hidden: Tensor) -> Tensor:
        self.at_once.append(len(hidden))
        return hidden


def expected(token_ids: Sequence[int], start: int) -> list[float]:
    """The fake model's log probability of each token from `start` on, after all that stand before it."""
    return [
        float(fake_logits(token_ids[:i]).log_softmax(-1)[token_ids[i]]) for i in range(start, len(token_ids))
    ]


def told(scores, token_ids) -> list[float]:
    """The log probability of each token, out of the engine's records."""
    return [own[token_id].logprob for own, token_id in zip(scores, token_ids, strict=True)]


def step(engine: LLMEngine) -> list:
    """A step's outputs, none of which may have failed."""
    outputs = engine.step()
    for output in outputs:
        assert not output.error, output.error
    return outputs


def finish(engine: LLMEngine) -> dict:
    """request id -> its last output, none of which may have failed."""
    done = run_to_end(engine)
    for output in done.values():
        assert not output.error, output.error
    return done
