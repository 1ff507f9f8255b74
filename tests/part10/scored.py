"""The fake model with a prompt's rows, what its scores ought to be, and engines that must not fail."""

from bisect import bisect
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.core.llm_engine import LLMEngine
from engine.execution.runner import Logits
from engine.requests.batch import Batch
from tests.part06.fakes import FakeForward, fake_logits, run_to_end


class ScoringFake(FakeForward):
    """Hidden states are logits already; `at_once` notes how many go through `logits` together."""

    def __init__(self, cache) -> None:
        super().__init__(cache)
        self.at_once: list[int] = []

    def __call__(self, batch: Batch) -> Logits:
        logits, hidden = super().__call__(batch), []
        for row in batch.rows.prompt_rows:
            held = self.cache.tokens[batch.ids[bisect(batch.query_start, row) - 1]]
            hidden.append(fake_logits(held[: batch.positions[row] + 1]))
        return logits._replace(prompt_hidden=torch.stack(hidden)) if hidden else logits

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
