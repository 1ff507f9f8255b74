"""Steps on several ranks: rank 0 sends each step to the other ranks, and all ranks compute it. Extension A.

Every rank has a runner with its part of the model and of the KV cache, and all runners compute the same
record. Only rank 0 schedules and chooses tokens. This module does not know how a model is divided
(shards.py), nor how processes are started (launch.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

import torch
from torch import Tensor

from engine.execution.runner import Logits, ModelRunner, SubmittedStep, TokenKeeper
from engine.lora.adapter import Adapter
from engine.lora.slots import AdapterSlots
from engine.parallel.group import SUM_SECONDS, Group
from engine.parallel.launch import Workers
from engine.parallel.orders import (
    ADAPTER,
    STEP,
    SequenceNumbers,
    adapter_payload,
    read_adapter_payload,
    read_orders,
    read_step_payload,
    step_from,
    step_numbers,
    step_payload,
)
from engine.requests.batch import Batch
from engine.requests.step import Pending, StepResult


class LeadingExecutor:
    """Rank 0's executor: has each step computed by all ranks.

    The other ranks begin a step as soon as they have its record, and wait in the step's sums for rank 0. If
    rank 0 fails after it has sent the record, no rank can go on, so RankLost is raised. A RankLost ends the
    engine: it is no `Exception`, so it is never taken for the error of one request.
    """

    def __init__(self, runner: ModelRunner, workers: Workers, slots: AdapterSlots | None) -> None:
        """`slots`: rank 0's adapter slots, or None without adapters. From now on, each adapter that gets a
        slot is sent to the other ranks.
        """
        self.runner, self.workers = runner, workers
        self._sequences = SequenceNumbers()
        if slots is not None:
            slots.on_assign.append(self._send_adapter)

    def submit(self, batch: Batch) -> Pending:
        """Start the step on all ranks, as `ModelRunner.submit` does on one. Raises RankLost."""
        numbers = step_numbers(batch, self._sequences.of(batch.ids))
        with self.workers.raising_rank_lost():
            way_number = self.runner.way_number(batch)
            # The order goes out first, so that the other ranks begin while rank 0 prepares its own part.
            self.workers.send_order(STEP, step_payload(way_number, numbers))
            return StepOnAllRanks(self.runner.submit(batch, way_number), self.workers)

    def on_lost(self, callback: Callable[[BaseException], None]) -> None:
        """Have `callback` called when another rank is lost, in a step or between two steps."""
        self.workers.on_lost(callback)

    def shutdown(self) -> None:
        """End the other ranks. Graphs with sums inside are freed first: NCCL does not end before them."""
        self.runner.ways.clear()
        self.workers.stop()

    def _send_adapter(self, slot: int, adapter: Adapter) -> None:
        """Send an adapter, which has got a slot on rank 0, to the other ranks. Raises RankLost."""
        with self.workers.raising_rank_lost():  # the others would compute with what was in the slot before
            self.workers.send_order(ADAPTER, adapter_payload(slot, adapter))


@dataclass(frozen=True, slots=True)
class StepOnAllRanks:
    """A `Pending` step that all ranks compute."""

    step: SubmittedStep  # of rank 0's runner
    workers: Workers

    def result(self) -> StepResult:
        """Wait for the result of rank 0's runner.

        Raises RankLost, also if the device still waits in a sum for a rank that has ended or does not answer:
        nothing on the device can end such a wait.
        """
        with self.workers.raising_rank_lost():
            self.workers.wait_for(self.step.is_done, SUM_SECONDS)
            return self.step.result()


class SharedTokens:
    """A `TokenKeeper` with equal contents on all ranks: the tokens that rank 0 chose, or none."""

    def __init__(self, last_tokens: TokenKeeper, group: Group) -> None:
        self.last_tokens, self.group = last_tokens, group

    def remember(self, batch: Batch, token_ids: Tensor) -> None:
        """Keep rank 0's token_ids[R] on all ranks. The other ranks' `token_ids` have the same length, and may
        be overwritten. After a step with drafts no rank keeps tokens (`LastTokens`), so none are sent. Raises
        RuntimeError, as `Group.broadcast` does.
        """
        if not batch.has_drafts:
            token_ids = self.group.broadcast(token_ids.to(self.group.device))
        self.last_tokens.remember(batch, token_ids)


def choose_nothing(logits: Logits, batch: Batch) -> Tensor:
    """The `select` of ranks that choose no token: token_ids[R], all 0."""
    return torch.zeros(len(batch.rows.chosen), dtype=torch.long, device=logits.values.device)


def follow(runner: ModelRunner, slots: AdapterSlots | None, orders: IO[bytes]) -> None:
    """The loop of ranks 1 and up: carry out each order until the order to stop, or until rank 0 has ended.

    A step is computed by the way whose number rank 0 has sent. Two ways make sums of different sizes for the
    same step: a graph also sums its rows of padding. So all ranks must take the same way, and only rank 0,
    which has the whole step, can choose it.

    `slots`: this rank's adapter slots, or None without adapters. Raises any exception of a step.
    """
    for kind, payload in read_orders(orders):
        if kind == STEP:
            way_number, numbers = read_step_payload(payload)
            runner.submit(step_from(numbers), way_number)
        else:
            assert slots is not None  # rank 0 sends adapters only if all ranks have slots
            slot, adapter = read_adapter_payload(payload)
            slots.write_later(slot, adapter)
