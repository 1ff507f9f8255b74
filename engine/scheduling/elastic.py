"""Continuous batching that makes steps smaller when the device's memory runs out. Part 15.

The memory of keys and values is allocated at the start. The other memory of a step (hidden states, logits,
keys gathered from pages) grows with the step's tokens and sequences, and another program may have taken that
memory. A step that runs out of memory fails no request, except a request that cannot run even alone. Steps
reach their full size again once there is memory.
"""

import re
import traceback

import torch

from engine.cache.manager import KVCacheManager
from engine.requests.request import Request
from engine.requests.step import Step
from engine.scheduling.continuous import ContinuousScheduler
from engine.scheduling.scheduler import by_rank, fail_all

GROWTH_STEPS = 64  # after this many steps in which memory did not run out, a step may be twice as large
OUT_OF_MEMORY = re.compile("out of memory|not enough memory|can't allocate memory|CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: Exception) -> bool:
    """Whether a step failed for lack of memory. PyTorch has an exception type for a GPU's memory. Errors of a
    CPU's memory, and of libraries on a GPU, are known by their messages only.
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and bool(OUT_OF_MEMORY.search(str(error)))


class ElasticScheduler(ContinuousScheduler):
    """A `ContinuousScheduler` whose `max_num_seqs` and `max_num_batched_tokens` shrink when memory runs out,
    and grow again up to their values at the start.
    """

    def __init__(
        self, cache: KVCacheManager, max_num_seqs: int, max_num_batched_tokens: int, **options
    ) -> None:
        """The arguments are those of `ContinuousScheduler`, which raises ValueError."""
        super().__init__(cache, max_num_seqs, max_num_batched_tokens, **options)
        self._full_num_seqs, self._full_num_tokens = max_num_seqs, max_num_batched_tokens
        self._num_succeeded = 0  # steps since memory ran out or since the last growth, whichever was later
        self.num_out_of_memory = 0  # steps that ran out of memory, since the start

    def recover(self, step: Step, error: Exception) -> list[Request]:
        """Return the requests to fail after `step` failed with `error` and was rolled back. This is the
        `recover` of LLMEngine.

        If the step did not run out of memory, all its requests fail. If it did, the first of these rules that
        fits applies:

        1. The step had one token, and at most one request runs: no step can be smaller, so the step's request
           fails.
        2. The step had more tokens than there are running requests, such as several of a prompt, or drafts
           (Part 16): the next step has at most half as many tokens, but at least one for each running
           request. No request fails.
        3. Otherwise several requests run, and none can have fewer tokens: the running request of the worst
           rank is preempted. The next step has at most one token for each request that still runs. No request
           fails.

        The new limit of tokens is also a limit of running requests, since each needs a token.
        """
        if not is_out_of_memory(error):
            return fail_all(step, error)
        _free_tensors(error)
        self.num_out_of_memory += 1
        self._num_succeeded = 0
        num_tokens = step.batch.num_tokens
        if len(self.running) <= 1 and num_tokens == 1:
            return fail_all(step, error)
        if num_tokens > len(self.running):
            new_limit = max(num_tokens // 2, len(self.running))
        else:
            self._preempt(max(self.running, key=by_rank))
            new_limit = len(self.running)
        self.max_num_batched_tokens = new_limit
        self.max_num_seqs = min(self.max_num_seqs, new_limit)
        return []

    def update(self, step: Step, drafts: list[list[int]] | None = None) -> None:
        """As in `Queues`. After GROWTH_STEPS steps since memory ran out or the limits last grew, both limits
        double, up to their values at the start.
        """
        super().update(step, drafts)
        self._num_succeeded += 1
        if self._num_succeeded >= GROWTH_STEPS:
            self._num_succeeded = 0
            self.max_num_batched_tokens = min(self._full_num_tokens, 2 * self.max_num_batched_tokens)
            self.max_num_seqs = min(self._full_num_seqs, 2 * self.max_num_seqs)


def _free_tensors(error: Exception) -> None:
    """Free the failed step's tensors, which the frames of the traceback refer to while the error exists."""
    traceback.clear_frames(error.__traceback__)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
