"""Gives loaded models their memory for keys and values, and their runners. Part 20's wiring.

devices.py loads the models. The memory is made in compose_cache.py, and the ways in which a runner computes
its steps in runners.py.
"""

from dataclasses import dataclass, replace

import torch

from engine.execution.runner import Executor, ModelRunner
from engine.execution.scores import logprobs_of
from engine.lora.slots import AdapterSlots
from engine.models.config import ModelConfig
from engine.models.language_model import LanguageModel
from engine.speculation.config import MAX_DRAFTS, SpeculativeConfig
from engine.speculation.draft_model import DraftSampler
from engine.speculation.rejection_sampler import DraftProbs, RejectionSampler
from engine.text.tokenizer import Tokenizer
from engine.wiring.compose_cache import Memory, Sizes, kv_cache_bytes, make_memory
from engine.wiring.engine_args import EngineArgs
from engine.wiring.rank_interface import Rank
from engine.wiring.runners import make_runner

MAX_DRAFT_PASSES = MAX_DRAFTS + 1  # a draft model's passes that are submitted before the first is read


@dataclass(frozen=True)
class LoadedModels:
    """What this process has loaded. On a rank, `model` is this rank's part of the model."""

    args: EngineArgs  # with this machine's defaults filled in
    sizes: Sizes
    tokenizer: Tokenizer
    model: LanguageModel
    draft: LanguageModel | None  # None without a draft model
    slots: AdapterSlots | None  # None without adapters
    speculative: SpeculativeConfig | None  # None without speculation

    @property
    def configs(self) -> list[ModelConfig]:
        """The model's config and, if there is a draft model, its config. These models share the bytes for
        keys and values.
        """
        models = [self.model] if self.draft is None else [self.model, self.draft]
        return [model.config for model in models]

    @property
    def parameter(self) -> torch.Tensor:
        """A parameter of the model. Keys and values get its device and dtype."""
        return next(self.model.parameters())


@dataclass(frozen=True)
class Devices:
    """The memory and the runners of this process, the models' configs, and the executor of the model's steps.

    `draft_runner` and `draft_config` are None without a draft model.
    """

    args: EngineArgs  # with every default filled in: loading with these gives the same sizes and kernels
    tokenizer: Tokenizer
    config: ModelConfig  # the model's
    sizes: Sizes
    memory: Memory  # the model's keys and values
    runner: ModelRunner  # the model's, on this device
    executor: Executor  # computes the model's steps: `runner`, or the runners of several ranks
    slots: AdapterSlots | None  # None without adapters
    speculative: SpeculativeConfig | None  # None without speculation
    draft_runner: ModelRunner | None = None
    draft_config: ModelConfig | None = None


def make_devices(models: LoadedModels, rank: Rank | None) -> Devices:
    """Allocate memory for the models' keys and values, and make a runner for each model. `rank` is as in
    `load_one_device`.

    Raises ValueError if there is too little memory, or if the kernel that `attention` names cannot run here,
    and CheckpointError if a rank cannot read the model's config.
    """
    models = _with_kv_cache_bytes(models, rank)
    args, sizes, config = models.args, models.sizes, models.model.config
    memory = make_memory(args, config, sizes, models.parameter, models.configs)
    draft_probs = DraftProbs()
    runner = _model_runner(models, memory, draft_probs, rank)
    executor: Executor = rank.executor(runner, models.slots) if rank else runner
    if rank:  # `model.config` describes this rank's part; engines need the whole model's
        config = ModelConfig.from_pretrained(args.model, args.model_impl)
    devices = Devices(
        args=args,
        tokenizer=models.tokenizer,
        config=config,
        sizes=sizes,
        memory=memory,
        runner=runner,
        executor=executor,
        slots=models.slots,
        speculative=models.speculative,
    )
    if models.draft is None:
        return devices
    return _with_draft(devices, models, models.draft, draft_probs)


def _with_kv_cache_bytes(models: LoadedModels, rank: Rank | None) -> LoadedModels:
    """The same models; their options now say how many bytes the keys and values of all models take. Ranks
    take as many as the rank that has the fewest. Raises ValueError as `kv_cache_bytes` does.
    """
    num_processes = rank.num_on_host if rank else 1
    num_bytes = kv_cache_bytes(models.args, models.configs, models.sizes, models.parameter, num_processes)
    if rank:
        num_bytes = rank.all_reduce_min(num_bytes)
    # 0 would mean that the option is not set. One byte is too few as well, and `make_memory` says so.
    num_bytes = max(1, num_bytes)
    args = replace(models.args, kv_cache_memory_bytes=num_bytes, gpu_memory_utilization=None)
    return replace(models, args=args)


def _model_runner(
    models: LoadedModels, memory: Memory, draft_probs: DraftProbs, rank: Rank | None
) -> ModelRunner:
    """The model's runner, with the functions that adapters, log probabilities and speculation add.
    `draft_probs`: where a draft model leaves the probabilities of its tokens.
    """
    speculative = models.speculative
    runner = make_runner(
        models.args,
        models.model,
        memory,
        models.sizes,
        max_new_tokens=speculative.num_speculative_tokens + 1 if speculative else 1,
        in_flight=2 if models.args.async_scheduling else 1,
        sum_parts=rank.all_reduce_sum if rank else None,
        has_head=rank is None or rank.chooses,
    )
    runner.scores = list(logprobs_of(models.tokenizer, models.model.logits))
    if models.slots:
        runner.before.append(models.slots.prepare)
    if speculative:
        runner.select = RejectionSampler(draft_probs, runner.select)
    return runner


def _with_draft(
    devices: Devices, models: LoadedModels, draft: LanguageModel, draft_probs: DraftProbs
) -> Devices:
    """The devices with the draft model's memory and runner. The memory has tensors of its own, and shares the
    model's plan: a sequence has the same block numbers in both. From now on, the model's runner copies blocks
    in both.
    """
    args, sizes = devices.args, devices.sizes
    memory = make_memory(args, draft.config, sizes, models.parameter, models.configs)
    # The model's steps carry the plan's copies of blocks. The draft model's memory needs the same copies.
    devices.runner.before.append(lambda batch: memory.apply(batch.copies))
    # After the prompt, a pass of the draft model reads the tokens since its last pass: two if all its
    # proposals were accepted, otherwise one.
    runner = make_runner(args, draft, memory, sizes, max_new_tokens=2, in_flight=MAX_DRAFT_PASSES)
    runner.select = DraftSampler(draft_probs)
    return replace(devices, draft_runner=runner, draft_config=draft.config)
