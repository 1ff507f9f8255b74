"""Continuous batching that bends when memory runs out: a smaller step instead of a failed one. Part 15.

Keys and values have their memory from the start; what a step needs beside it (hidden states, logits, keys
gathered from pages) grows with its tokens and its sequences, and somebody else may have taken it. Promises
that a step that runs out of memory costs no request its life unless that request cannot run alone, and that
the engine finds its full size again once there is memory.
"""

import re
import traceback

import torch

from engine.cache.manager import KVCacheManager
from engine.requests.request import Request
from engine.requests.step import Step
from engine.scheduling.continuous import ContinuousScheduler
from engine.scheduling.scheduler import by_rank, fail_all

CALM_STEPS = 64  # that succeed in a row: then a step may be twice as large again
NO_MEMORY = re.compile("out of memory|not enough memory|can't allocate memory|CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: Exception) -> bool:
    """PyTorch has an exception for a GPU's memory; the CPU's, and the GPU's libraries, say it in words."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and bool(NO_MEMORY.search(str(error)))


class ElasticScheduler(ContinuousScheduler):
    """`max_num_seqs` and `max_num_batched_tokens` are at most what they were at the start."""

    def __init__(
        self, cache: KVCacheManager, max_num_seqs: int, max_num_batched_tokens: int, **options
    ) -> None:
        super().__init__(cache, max_num_seqs, max_num_batched_tokens, **options)
        self._full = max_num_seqs, max_num_batched_tokens
        self._calm = 0  # steps that have succeeded since memory ran out, or since the last growth
        self.num_out_of_memory = 0

    def recover(self, step: Step, error: Exception) -> list[Request]:
        """Who fails, after a step failed with `error` and was rolled back: LLMEngine's `recover`.

        Any other error fails all of the step. Out of memory spares all it can; the next step is smaller:

        1. A step of more tokens than there are running requests has a prompt in it: the next has at most
           half as many tokens, but one for each running request. Nobody leaves.
        2. Else each has one token at most, and there is one request too many: the running one of the worst
           rank is preempted. The next step has as many seats, and tokens, as there are running requests left.
        3. But where one request runs, with one token, there is no smaller step: it fails. (One that runs
           beside others is not alone, though the step may hold its token only: rule 2.)
        """
        if not is_out_of_memory(error):
            return fail_all(step, error)
        _let_go(error)
        self.num_out_of_memory += 1
        self._calm = 0
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
        """As ever; and after CALM_STEPS steps that succeed in a row, the next may be twice as large."""
        super().update(step, drafts)
        self._calm += 1
        if self._calm >= CALM_STEPS:
            self._calm = 0
            seats, tokens = self._full
            self.max_num_batched_tokens = min(tokens, 2 * self.max_num_batched_tokens)
            self.max_num_seqs = min(seats, 2 * self.max_num_seqs)


def _let_go(error: Exception) -> None:
    """The frames of the step that failed hold its tensors for as long as its traceback is there."""
    traceback.clear_frames(error.__traceback__)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
