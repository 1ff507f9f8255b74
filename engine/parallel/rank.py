"""What one process does for a model that several ranks share, at load and in steps. Extension A."""

from functools import partial

from engine.execution.runner import Executor, ModelRunner
from engine.lora.slots import AdapterSlots
from engine.models.language_model import LanguageModel
from engine.models.loader import Sharding
from engine.parallel.executor import LeadingExecutor, SharedTokens, choose_nothing
from engine.parallel.group import Group
from engine.parallel.launch import Workers
from engine.parallel.layers import row_max, sum_over_ranks
from engine.parallel.shards import Shards


class ProcessRank:
    """The rank of this process, a `Rank` of engine/wiring/rank_interface.py."""

    def __init__(self, group: Group, workers: Workers | None = None) -> None:
        """`workers`: the processes of the other ranks, on rank 0; None on the other ranks."""
        self.group, self.workers = group, workers
        # The members of `Rank`; their docstrings stand there.
        shards = Shards(group.rank, group.size)
        self.sharding: Sharding = shards
        self.shard_adapter = shards.adapter
        self.row_max = partial(row_max, group)
        self.all_reduce_sum, self.all_reduce_min = group.all_reduce_sum, group.all_reduce_min
        self.chooses = group.rank == 0  # tokens
        # Ranks on CPUs share the host's memory.
        self.num_on_host = 1 if group.device.type == "cuda" else group.size

    def join(self, model: LanguageModel) -> LanguageModel:
        """Add the sums over the ranks to `model`, in place, and on all ranks but 0 drop its output layer
        (`sum_over_ranks`). Returns `model`.
        """
        return sum_over_ranks(model, self.group)

    def executor(self, runner: ModelRunner, slots: AdapterSlots | None) -> Executor:
        """The executor of this rank. On rank 0, a `LeadingExecutor`, which sends each step to the others. On
        another rank, `runner` itself, changed so that it chooses and scores no tokens. On every rank, the
        runner's last tokens become those that rank 0 has chosen. `slots`: this rank's adapter slots, or None
        without adapters.
        """
        if runner.last_tokens is not None:
            runner.last_tokens = SharedTokens(runner.last_tokens, self.group)
        if self.workers is not None:
            return LeadingExecutor(runner, self.workers, slots)
        runner.select, runner.scores = choose_nothing, []
        return runner
