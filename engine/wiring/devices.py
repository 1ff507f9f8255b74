"""Loads the models that `EngineArgs` names, and makes each model's memory and runner. Part 20's wiring.

Every option takes effect, or an error says why it cannot. The linear layers of a model are changed in this
order: merge, quantize, wrap for adapters, sum over ranks, pack. `compose.py` builds an engine from the
result, and `replay.py` runs recorded steps without an engine. The memory is made in `compose_cache.py`. One
device is loaded here; Extension A loads one in each of several processes.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from engine.cache.memory import PageMemory
from engine.execution.last_tokens import LastTokens
from engine.execution.runner import EagerWay, Executor, ModelRunner, Way
from engine.execution.scores import logprobs_of
from engine.layers.packed_linear import pack_linears
from engine.lora.adapter import Adapter
from engine.lora.slots import AdapterSlots
from engine.machine.huge_pages import huge_pages
from engine.models.checkpoint import CheckpointError, resolve
from engine.models.config import AUTO, OURS, ModelConfig
from engine.models.language_model import LanguageModel
from engine.models.loader import Sharding, load_model
from engine.quantization.checkpoint import restore
from engine.quantization.quantize import pack_quantized, quantize
from engine.speculation.config import MAX_DRAFTS, SpeculativeConfig
from engine.speculation.draft_model import DraftSampler
from engine.speculation.rejection_sampler import DraftProbs, RejectionSampler
from engine.text.tokenizer import Tokenizer
from engine.wiring.compose_cache import Memory, Sizes, kv_cache_bytes, make_memory, memory_of
from engine.wiring.defaults import refuse_absent_gpu, with_defaults
from engine.wiring.engine_args import EngineArgs
from engine.wiring.extensions import wiring_of

MAX_DRAFT_PASSES = MAX_DRAFTS + 1  # a draft model's passes that are submitted before the first is read


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


@dataclass(frozen=True)
class Devices:
    """The models, memory and runners of this process, and the executor of the model's steps.

    `draft` and `draft_config` are None without a draft model.
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
    draft: ModelRunner | None = None  # the draft model's
    draft_config: ModelConfig | None = None


def load_devices(args: EngineArgs) -> Devices:
    """Load the models on as many devices as `args` say: `load_one_device`, or Extension A's function for
    several devices. Raises CheckpointError or ValueError, as these do.
    """
    if args.tensor_parallel_size > 1:
        return wiring_of("A").load_devices(args)
    return load_one_device(args)


def load_one_device(args: EngineArgs, rank: Rank | None = None) -> Devices:
    """Load the models, allocate memory for their keys and values, and make a runner for each. `rank`: this
    process's part in a model that several devices share; None if the device has the whole model.

    Raises CheckpointError if a model or tokenizer cannot be loaded, ValueError if an option cannot be met on
    this machine or with this model.
    """
    # 1. Options, with defaults for those that are not set.
    refuse_absent_gpu(str(args.device))
    args, sizes = with_defaults(args)
    tokenizer = _tokenizer_of(args)
    speculative = None
    if args.speculative_config is not None:
        speculative = SpeculativeConfig.from_dict(args.speculative_config)
    slots = _adapter_slots(args, sizes, rank)
    # 2. The model, and the draft model if there is one.
    model = _load(args, sizes, args.model, args.dtype, args.quantization, slots, rank, args.model_impl)
    if model.config.model_impl != OURS:  # library code may wait for the device, which a graph cannot record
        args = replace(args, enforce_eager=True)
    max_positions = model.config.max_positions
    sizes = replace(sizes, max_model_len=sizes.max_model_len or max_positions)
    if sizes.max_model_len > max_positions:
        raise ValueError(f"max_model_len={sizes.max_model_len}: the model sees {max_positions} tokens")
    draft = None
    if speculative is not None and speculative.model is not None:
        draft = _load_draft(args, sizes, speculative.model, model)
    # 3. Memory for keys and values. The draft model has tensors of its own, and shares the model's plan: a
    #    sequence has the same block numbers in both.
    configs = [model.config] if draft is None else [model.config, draft.config]
    parameter = next(model.parameters())  # the memory takes this parameter's device and dtype
    num_bytes = kv_cache_bytes(args, configs, sizes, parameter, rank.num_on_host if rank else 1)
    if rank:
        num_bytes = rank.all_reduce_min(num_bytes)
    args = replace(args, kv_cache_memory_bytes=max(1, num_bytes), gpu_memory_utilization=None)
    memory = make_memory(args, model.config, sizes, parameter, configs)
    # 4. The model's runner, with the functions that adapters, log probabilities and speculation add.
    max_new_tokens = speculative.num_speculative_tokens + 1 if speculative else 1
    in_flight = 2 if args.async_scheduling else 1
    runner = _runner(args, model, memory, sizes, max_new_tokens, in_flight, rank)
    runner.scores = [*logprobs_of(tokenizer, model.logits)]
    if slots:
        runner.before.append(slots.prepare)
    draft_probs = DraftProbs()
    if speculative:
        runner.select = RejectionSampler(draft_probs, runner.select)
    executor: Executor = rank.executor(runner, slots) if rank else runner
    config = model.config
    if rank:  # `model.config` describes this rank's part; `config` describes the whole model
        config = ModelConfig.from_pretrained(args.model, args.model_impl)
    if draft is None:
        return Devices(args, tokenizer, config, sizes, memory, runner, executor, slots, speculative)
    # 5. The draft model's memory and runner.
    draft_memory = make_memory(args, draft.config, sizes, parameter, configs)
    # The model's steps carry the plan's copies of blocks. The draft model's memory needs the same copies.
    runner.before.append(lambda batch: draft_memory.apply(batch.copies))
    # In a pass the draft model reads the tokens since its last pass: two tokens if all its proposals were
    # accepted, otherwise one.
    draft_runner = _runner(args, draft, draft_memory, sizes, max_new_tokens=2, in_flight=MAX_DRAFT_PASSES)
    draft_runner.select = DraftSampler(draft_probs)
    return Devices(
        args,
        tokenizer,
        config,
        sizes,
        memory,
        runner,
        executor,
        slots,
        speculative,
        draft_runner,
        draft.config,
    )


def _tokenizer_of(args: EngineArgs) -> Tokenizer:
    """The tokenizer of `args.tokenizer`, or by default of the model. Raises CheckpointError, which mentions
    the option --tokenizer if that option is not set.
    """
    folder = resolve(args.tokenizer or args.model)
    try:
        return Tokenizer.from_pretrained(folder)
    except CheckpointError as error:
        if args.tokenizer is not None:
            raise
        raise CheckpointError(f"{error}; --tokenizer takes another folder") from None


def _adapter_slots(args: EngineArgs, sizes: Sizes, rank: Rank | None) -> AdapterSlots | None:
    """The slots for adapters, still without memory; None without `enable_lora`."""
    if not args.enable_lora:
        return None
    shard_adapter = rank.shard_adapter if rank else None
    return AdapterSlots(args.max_loras, args.max_lora_rank, sizes.max_num_batched_tokens, shard_adapter)


def _load(
    args: EngineArgs,
    sizes: Sizes,
    model: str | Path,
    dtype: str | torch.dtype,
    quantization: str | None = None,
    slots: AdapterSlots | None = None,
    rank: Rank | None = None,
    model_impl: str = AUTO,
) -> LanguageModel:
    """The model, ready to run. On a CPU its weights lie on huge pages. Raises CheckpointError or ValueError
    as `load_devices` does.
    """
    transform = partial(
        _transformed, args=args, sizes=sizes, quantization=quantization, slots=slots, rank=rank
    )
    with huge_pages() if str(args.device).startswith("cpu") else nullcontext():
        return load_model(
            model,
            args.device,
            dtype,
            args.load_format,
            transform=transform,
            restore_quantized=restore,
            sharding=rank.sharding if rank else None,
            model_impl=model_impl,
        )


def _transformed(
    model: LanguageModel,
    args: EngineArgs,
    sizes: Sizes,
    quantization: str | None,
    slots: AdapterSlots | None,
    rank: Rank | None,
) -> LanguageModel:
    """The loaded model, quantized, wrapped for adapters, joined with the other ranks' parts, and packed.
    Packing comes last because it replaces the linear layers that the others look for. Raises ValueError if
    there is no memory for the adapters.
    """
    if quantization is not None:
        model = quantize(model, quantization, row_max=rank.row_max if rank else None)
    if slots is not None:
        device = next(model.parameters()).device
        free, total = memory_of(device)
        # On a CPU, `free` leaves out the system's cache of files, which the system gives up on demand.
        available = free if device.type == "cuda" else total
        needed = slots.num_bytes(model)
        if needed > available:
            raise ValueError(
                f"max_loras={args.max_loras} of max_lora_rank={args.max_lora_rank} need {needed:,} bytes; "
                f"there are {available:,}"
            )
        model = slots.wrap(model)
    if rank is not None:
        model = rank.join(model)
    if runs_graphs(args):  # kernels of the graphs read plain weights, not packed ones
        return pack_quantized(model)
    return pack_quantized(pack_linears(model, rows=sizes.max_num_seqs))


def _load_draft(args: EngineArgs, sizes: Sizes, name: str | Path, model: LanguageModel) -> LanguageModel:
    """The draft model, in `model`'s dtype and without adapters. Raises CheckpointError if it cannot be
    loaded, ValueError if its vocabulary has another size than `model`'s.
    """
    draft = _load(args, sizes, name, next(model.parameters()).dtype)
    if draft.config.vocab_size != model.config.vocab_size:
        raise ValueError(
            f"speculative_config: {name} has {draft.config.vocab_size} tokens, and {args.model} "
            f"{model.config.vocab_size}: they must share a tokenizer"
        )
    return draft


def _runner(
    args: EngineArgs,
    model: LanguageModel,
    memory: Memory,
    sizes: Sizes,
    max_new_tokens: int,
    in_flight: int,
    rank: Rank | None = None,
) -> ModelRunner:
    """A runner for one model.

    `max_new_tokens` is the most tokens that a sequence has in a step once its prompt is computed.
    `in_flight` is the number of steps that may be submitted before the first one's result is read.
    `rank`: None if the model is whole. All ranks record the same graphs, in the same order.
    """
    if model.config.attention_extras:
        return wiring_of("C").runner(args, model, memory, sizes, max_new_tokens, in_flight)
    device = next(model.parameters()).device
    last_tokens = LastTokens(sizes.max_num_seqs, device)
    if not (runs_graphs(args) and isinstance(memory, PageMemory)):
        if in_flight == 1:  # the host knows every token of a step before it submits the step
            return ModelRunner([EagerWay(model, memory)], memory)
        return ModelRunner(
            [EagerWay(model, memory, upload=last_tokens.upload)], memory, last_tokens=last_tokens
        )
    from engine.execution.graphs import DecodeGraphs, GraphWay  # imported here because triton is optional
    from engine.execution.steps import steps, verifying_steps
    from engine.execution.verifying import num_rows
    from engine.kernels.llama_prompts import prompt_forward
    from engine.kernels.verify_attend import MOST_NEW

    V, max_seqs = model.config.vocab_size, sizes.max_num_seqs
    sum_parts = rank.all_reduce_sum if rank else None
    if rank and not rank.chooses:
        V = 0
    max_blocks = -(-sizes.max_model_len // memory.block_size)  # of the longest sequence, rounded up

    def graphs(make_steps: Callable, max_rows: int) -> DecodeGraphs:
        step = make_steps(model, memory, max_rows, sum_parts)
        return DecodeGraphs(
            step, last_tokens, V, max_rows, max_blocks, device.type == "cuda", max(2, in_flight)
        )

    # A step runs in the first way that fits: as a graph if it has few rows, otherwise kernel by kernel.
    ways: list[Way] = [GraphWay(graphs(steps, max_seqs), V)]
    if max_new_tokens > 1:
        max_rows = num_rows(max_seqs, max_new_tokens, sizes.max_num_batched_tokens)
        ways.append(GraphWay(graphs(verifying_steps, max_rows), V, max_new=MOST_NEW))
    ways.append(EagerWay(model, memory, prompt_forward(model, sum_parts), last_tokens.upload))
    return ModelRunner(ways, memory, last_tokens=last_tokens)


def runs_graphs(args: EngineArgs) -> bool:
    """Whether steps of few rows run as CUDA graphs. Graphs need the Triton kernels, which read pages."""
    return args.attention == "triton" and args.kv_cache == "paged" and not args.enforce_eager
