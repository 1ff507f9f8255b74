"""Requests without text, and a step without a model."""

from engine.batch import Batch
from engine.decoding.params import SamplingParams
from engine.decoding.sampling import Row
from engine.scheduling.request import Request

PARAMS = SamplingParams()


class Countdown:
    """Stands for GrowingOutput: done after `length` tokens."""

    def __init__(self, length: int) -> None:
        self.left = length

    def append(self, token_id: int) -> bool:
        self.left -= 1
        return self.left == 0


def make_request(name: str, prompt: int, output: int, priority: int = 0) -> Request:
    """A request of `prompt` tokens that is done after `output` more."""
    ids = list(range(prompt))
    return Request(
        name, name, ids, prompt, PARAMS, Countdown(output), Row(PARAMS, ids, [], 0), priority=priority
    )


def play(scheduler) -> Batch | None:
    """One step in which all goes well: a token for each sequence that is complete."""
    batch = scheduler.schedule()
    if batch is None:
        left = [request.id for request in (*scheduler.running, *scheduler.waiting)]
        assert not left, f"schedule() returned None, nothing to do, yet these are not done: {', '.join(left)}"
    else:
        done = [r for r, rows in zip(batch.requests, batch.logit_rows, strict=True) if rows and r.append(7)]
        scheduler.update(batch)
        for request in done:
            scheduler.finish(request)
    return batch


def chosen(batch: Batch | None) -> dict[str, int]:
    """request -> new tokens in the step."""
    assert batch is not None, "schedule() returned None, nothing to do, though a step was due"
    return {request.id: batch.num_new_tokens(s) for s, request in enumerate(batch.requests)}
