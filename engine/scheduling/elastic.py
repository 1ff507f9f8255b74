"""Continuous batching that makes steps smaller when the device's memory runs out. Part 15.

Keys and values have their memory from the start; what a step needs beside it (hidden states, logits, keys
gathered from pages) grows with its tokens and its sequences, and another program may have taken it. Promises
that a step that runs out of memory fails no request, unless that request cannot run alone, and that steps
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

GROWTH_STEPS = 64  # after so many steps in a row that succeed, a step may be twice as large
OUT_OF_MEMORY = re.compile("out of memory|not enough memory|can't allocate memory|CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: Exception) -> bool:
    """Whether a step failed for lack of memory. PyTorch has an exception for a GPU's memory; for a CPU's, and
    for libraries on a GPU, only the message says it.
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and bool(OUT_OF_MEMORY.search(str(error)))


class ElasticScheduler(ContinuousScheduler):
    """A `ContinuousScheduler` whose `max_num_seqs` and `max_num_batched_tokens` shrink when memory runs out,
    and grow back to what they were at the start.
    """

    def __init__(
        self, cache: KVCacheManager, max_num_seqs: int, max_num_batched_tokens: int, **options
    ) -> None:
        super().__init__(cache, max_num_seqs, max_num_batched_tokens, **options)
        self._full_size = max_num_seqs, max_num_batched_tokens
        self._num_succeeded = 0  # steps, since memory ran out or since the last growth
        self.num_out_of_memory = 0

    def recover(self, step: Step, error: Exception) -> list[Request]:
        """The requests that fail, after a step failed with `error` and was rolled back: LLMEngine's
        `recover`.

        Any other error fails all requests of the step. Out of memory, the next step is smaller, and as few
        fail as can be:

        1. A step of more tokens than there are running requests has a prompt in it: the next has at most
           half as many tokens, but one for each running request. No request leaves.
        2. Else each has one token at most, and there is one request too many: the running one of the worst
           rank is preempted. The next step has as many seats, and tokens, as there are running requests left.
        3. But where one request runs, with one token, there is no smaller step: it fails. (One that runs
           beside others is not alone, though the step may hold its token only: rule 2.)
        """
        if not is_out_of_memory(error):
            return fail_all(step, error)
        _free_tensors(error)
        self.num_out_of_memory += 1
        self._num_succeeded = 0
        num_tokens = step.batch.num_tokens
        if len(self.running) <= 1 and num_tokens == 1:
            return fail_all(step, error)
        tokens = max(num_tokens // 2, len(self.running), 1)
        if num_tokens <= len(self.running):
            self._preempt(max(self.running, key=by_rank))
            tokens = len(self.running)
        self.max_num_batched_tokens = tokens
        self.max_num_seqs = min(self.max_num_seqs, tokens)
        return []

    def update(self, step: Step, drafts: list[list[int]] | None = None) -> None:
        """As in `Queues`; after GROWTH_STEPS steps that succeed in a row, the next may be twice as large."""
        super().update(step, drafts)
        self._num_succeeded += 1
        if self._num_succeeded >= GROWTH_STEPS:
            self._num_succeeded = 0
            seats, tokens = self._full_size
            self.max_num_batched_tokens = min(tokens, 2 * self.max_num_batched_tokens)
            self.max_num_seqs = min(seats, 2 * self.max_num_seqs)


def _free_tensors(error: Exception) -> None:
    """Clear the frames of the traceback: they hold the failed step's tensors for as long as it exists."""
    traceback.clear_frames(error.__traceback__)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
