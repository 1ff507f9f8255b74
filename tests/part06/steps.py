"""Requests without text, and a step without a model."""

from engine.decoding.params import SamplingParams
from engine.decoding.sampling_state import SamplingState
from engine.requests.batch import Batch
from engine.requests.request import Request
from engine.requests.step import Step
from engine.scheduling.scheduler import Queues

PARAMS = SamplingParams()


class Everybody(Queues):
    """A scheduler that runs all requests in every step."""

    def schedule(self) -> Step | None:
        while self.waiting and self.admit_next():
            pass
        for request in self.running:
            self.cache.reserve(request, len(request.token_ids))
        return self.make_step([(r, r.num_tokens_to_compute) for r in self.running]) if self.running else None


class Countdown:
    """Stands for GrowingOutput: done after `length` tokens."""

    def __init__(self, length: int) -> None:
        self.token_ids: list[int] = []
        self.limit = length

    def append(self, token_id: int) -> bool:
        self.token_ids.append(token_id)
        return len(self.token_ids) == self.limit


def make_request(name: str, prompt: int, output: int, priority: int = 0) -> Request:
    """A request of `prompt` tokens that is done after `output` more."""
    ids = list(range(prompt))
    return Request(
        name,
        name,
        ids,
        prompt,
        PARAMS,
        Countdown(output),
        SamplingState(PARAMS, ids, [], 0),
        priority=priority,
    )


def play(scheduler) -> Batch | None:
    """One step in which all goes well: a token for each sequence that is complete."""
    step = scheduler.schedule()
    if step is None:
        left = [request.id for request in (*scheduler.running, *scheduler.waiting)]
        assert not left, f"schedule() returned None, nothing to do, yet these are not done: {', '.join(left)}"
    else:
        done = [request for request in step.sampled_requests() if request.confirm(7, 0.0)]
        scheduler.update(step)
        for request in done:
            scheduler.finish(request)
    return step.batch if step else None


def chosen(batch: Batch | None) -> dict[str, int]:
    """request -> new tokens in the step."""
    assert batch is not None, "schedule() returned None, nothing to do, though a step was due"
    return {name: batch.num_new_tokens(s) for s, name in enumerate(batch.ids)}


def scheduled(scheduler) -> dict[str, int]:
    """The next step, which is now under way: request -> new tokens."""
    step = scheduler.schedule()
    return chosen(step.batch if step else None)
