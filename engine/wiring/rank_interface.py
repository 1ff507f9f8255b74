"""`Rank`: what the wiring asks of a rank, if several devices share a model. Part 20's wiring.

Extension A implements it: `ProcessRank` of engine/parallel/rank.py. A process that has the whole model has no
rank; functions that take a rank then get None.
"""

from typing import Protocol

import torch

from engine.execution.runner import Executor, ModelRunner
from engine.lora.adapter import Adapter
from engine.lora.slots import AdapterSlots
from engine.models.language_model import LanguageModel
from engine.models.loader import Sharding


class Rank(Protocol):
    """This process's part in a model that several devices share (Extension A)."""

    sharding: Sharding
    num_on_host: int  # ranks that share the memory of this process's device
    chooses: bool  # whether this rank chooses tokens, and so has the output layer

    def shard_adapter(self, adapter: Adapter) -> Adapter:
        """This rank's part of an adapter."""

    def row_max(self, name: str, weight: torch.Tensor) -> torch.Tensor | None:
        """The largest magnitude in each row of a layer over all ranks; None if the rows are whole (`RowMax`
        in engine/quantization/quantize.py).
        """

    def join(self, model: LanguageModel) -> LanguageModel:
        """Put the sums over ranks into this rank's part of a model, in place; returns the model."""

    def all_reduce_sum(self, x: torch.Tensor) -> torch.Tensor:
        """Replace x, of any shape, by the sum over the ranks, and return x: for kernels in place of the
        model's layers. Raises RuntimeError if another rank has ended or does not join in time.
        """

    def all_reduce_min(self, number: int) -> int:
        """The minimum of `number` over the ranks, which must all call this. Raises RuntimeError as
        `all_reduce_sum` does.
        """

    def executor(self, runner: ModelRunner, slots: AdapterSlots | None) -> Executor:
        """The executor of this rank: on rank 0, one that has all ranks compute each step; on another rank,
        one that computes the steps that rank 0 sends. `runner` and `slots`: this rank's.
        """
