"""Loads the models that `EngineArgs` names. Part 20's wiring.

The linear layers of a model are changed in this order: quantize, wrap for adapters, sum over ranks, pack.
`compose_devices.py` makes the memory and the runners of the loaded models, `compose.py` builds an engine from
them, and `replay.py` runs recorded steps without an engine. One device is loaded here; Extension A loads one
in each of several processes.
"""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from engine.layers.packed_linear import pack_linears
from engine.lora.slots import AdapterSlots
from engine.machine.host_memory import available_memory
from engine.machine.huge_pages import huge_pages
from engine.models.checkpoint import CheckpointError, resolve
from engine.models.config import AUTO, OURS, ModelConfig
from engine.models.language_model import LanguageModel
from engine.models.loader import load_model
from engine.quantization.checkpoint import restore
from engine.quantization.quantize import pack_quantized, quantize
from engine.speculation.config import SpeculativeConfig
from engine.text.tokenizer import Tokenizer
from engine.wiring.compose_cache import Sizes, free_and_total_memory
from engine.wiring.compose_devices import Devices, LoadedModels, make_devices
from engine.wiring.defaults import refuse_absent_gpu, with_defaults
from engine.wiring.engine_args import EngineArgs
from engine.wiring.extensions import MANY_DEVICES, wiring_of
from engine.wiring.rank_interface import Rank
from engine.wiring.runners import runs_graphs


def load_devices(args: EngineArgs) -> Devices:
    """Load the models on as many devices as `args` say: `load_one_device`, or Extension A's function for
    several devices. Raises CheckpointError or ValueError, as these do.
    """
    if args.tensor_parallel_size > 1:
        return wiring_of(MANY_DEVICES).load_devices(args)
    return load_one_device(args)


def load_one_device(args: EngineArgs, rank: Rank | None = None) -> Devices:
    """Load the models, allocate memory for their keys and values, and make a runner for each. `rank`: this
    process's part in a model that several devices share; None if the device has the whole model.

    Raises CheckpointError if a model or tokenizer cannot be loaded, ValueError if an option cannot be met on
    this machine or with this model.
    """
    return make_devices(_load_models(args, rank), rank)


def _load_models(args: EngineArgs, rank: Rank | None) -> LoadedModels:
    """The tokenizer, the model, and the draft model if there is one. Raises as `load_one_device` does."""
    # 1. Options, with defaults for those that are not set.
    refuse_absent_gpu(str(args.device))
    args, sizes = with_defaults(args)
    tokenizer = _tokenizer_of(args)
    speculative = None
    if args.speculative_config is not None:
        speculative = SpeculativeConfig.from_dict(args.speculative_config)
    slots = _adapter_slots(args, sizes, rank)
    # 2. The model, which says how long a sequence may be.
    model = _load(
        args,
        sizes,
        args.model,
        args.dtype,
        quantization=args.quantization,
        slots=slots,
        rank=rank,
        model_impl=args.model_impl,
    )
    if model.config.model_impl != OURS:  # library code may wait for the device, which a graph cannot record
        args = replace(args, enforce_eager=True)
    sizes = _with_max_model_len(sizes, model.config)
    # 3. The draft model.
    draft = None
    if speculative is not None and speculative.model is not None:
        draft = _load_draft(args, sizes, speculative.model, model)
    return LoadedModels(
        args=args,
        sizes=sizes,
        tokenizer=tokenizer,
        model=model,
        draft=draft,
        slots=slots,
        speculative=speculative,
    )


def _with_max_model_len(sizes: Sizes, config: ModelConfig) -> Sizes:
    """The sizes with the longest sequence: what the model sees, if `max_model_len` is not set. Raises
    ValueError if it is set to more.
    """
    if sizes.max_model_len > config.max_positions:
        raise ValueError(f"max_model_len={sizes.max_model_len}: the model sees {config.max_positions} tokens")
    return replace(sizes, max_model_len=sizes.max_model_len or config.max_positions)


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
    """The model, ready to run, in `dtype`. On a CPU its weights lie on huge pages, as far as Linux has them.
    `quantization`, `slots` and `rank`: as in `_transformed`. Raises CheckpointError or ValueError as
    `load_one_device` does.
    """
    transform = partial(
        _transformed, args=args, sizes=sizes, quantization=quantization, slots=slots, rank=rank
    )
    on_cpu = str(args.device).startswith("cpu")
    with huge_pages() if on_cpu else nullcontext():
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
    """The loaded model with its linear layers changed. The draft model is loaded through here, too, with a
    `quantization` and `slots` of its own.

    - `quantize(model, quantization, row_max=...)`, unless `quantization` is None. A rank may have parts of
      rows: then `row_max` is `rank.row_max`. Without a rank it is None.
    - `slots.wrap(model)`, if there are slots. Before it, `_refuse_large_adapters(slots, model, args)`.
    - `rank.join(model)`, if there is a rank: the sum over all ranks, of a layer's product and its adapter's.
    - `pack_linears(model, rows=...)`, for a full step: `sizes.max_num_seqs` rows. Not if `runs_graphs(args)`,
      because the kernels of graphs read plain weights.
    - `pack_quantized(model)`, always: it leaves what is not quantized as it is.

    Each step looks for linear layers, and puts linear layers in their place, which the next step finds. Only
    a packed layer is not found any more, so packing comes last.
    Raises ValueError if there is no memory for the adapters.
    """
    if quantization is not None:
        model = quantize(model, quantization, row_max=rank.row_max if rank else None)
    if slots is not None:
        _refuse_large_adapters(slots, model, args)
        model = slots.wrap(model)
    if rank is not None:
        model = rank.join(model)
    if not runs_graphs(args):
        model = pack_linears(model, rows=sizes.max_num_seqs)
    return pack_quantized(model)


def _refuse_large_adapters(slots: AdapterSlots, model: LanguageModel, args: EngineArgs) -> None:
    """Raise ValueError if there is no memory for all slots of this model."""
    device = next(model.parameters()).device
    available: int | None  # bytes; None if the system does not report it
    if device.type == "cuda":
        available, _ = free_and_total_memory(device)
    else:
        available = available_memory()
    needed = slots.num_bytes(model)
    if available is not None and needed > available:
        raise ValueError(
            f"max_loras={args.max_loras} of max_lora_rank={args.max_lora_rank} need {needed:,} bytes; "
            f"there are {available:,}"
        )


def _load_draft(args: EngineArgs, sizes: Sizes, name: str | Path, model: LanguageModel) -> LanguageModel:
    """The draft model, in `model`'s dtype, without adapters and not quantized. `args.model_impl` is the code
    that computes `model`; a draft only proposes tokens, so it is computed as by default (AUTO).

    Raises CheckpointError if it cannot be loaded, ValueError if its vocabulary has another size than
    `model`'s.
    """
    draft = _load(args, sizes, name, next(model.parameters()).dtype)
    if draft.config.vocab_size != model.config.vocab_size:
        raise ValueError(
            f"speculative_config: {name} has {draft.config.vocab_size} tokens, and {args.model} "
            f"{model.config.vocab_size}: they must share a tokenizer"
        )
    return draft
