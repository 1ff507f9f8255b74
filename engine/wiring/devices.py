"""What computes, from `EngineArgs`: models, their memories, and a runner for each. Part 20's wiring.

Promises runners whose every option has its effect, or a CheckpointError or ValueError that says why not.
Order at load: merge, quantize, wrap, pack. Who asks them is composed in engine/wiring/compose.py; what was
recorded is run again on them alone (engine/wiring/replay.py). The memory for keys and values:
compose_cache.py.
"""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from engine.cache.memory import PageMemory
from engine.execution.last_tokens import LastTokens
from engine.execution.runner import EagerWay, ModelRunner, Way
from engine.execution.scores import logprobs_of
from engine.layers.packed_linear import pack_linears
from engine.lora.slots import AdapterSlots
from engine.machine.huge_pages import huge_pages
from engine.models.checkpoint import CheckpointError, resolve
from engine.models.config import ModelConfig
from engine.models.language_model import LanguageModel
from engine.models.loader import load_model
from engine.quantization.quantize import pack_quantized, quantize
from engine.speculation.config import MOST_TOKENS, SpeculativeConfig
from engine.speculation.draft_model import DraftSampler
from engine.speculation.rejection_sampler import Proposals, RejectionSampler
from engine.text.tokenizer import Tokenizer
from engine.wiring.compose_cache import Memory, Sizes, kv_cache_bytes, make_memory, memory_of
from engine.wiring.engine_args import EngineArgs

CHAIN = MOST_TOKENS + 1  # passes of a draft model that follow one another before the host waits


@dataclass(frozen=True)
class Devices:
    """All that computes, on one device."""

    args: EngineArgs  # nothing is left open: made with these, all of it is the same again
    tokenizer: Tokenizer
    config: ModelConfig  # the model's
    sizes: Sizes
    memory: Memory
    runner: ModelRunner
    slots: AdapterSlots | None
    speculative: SpeculativeConfig | None
    proposals: Proposals  # from the draft model's runner to the model's
    draft: ModelRunner | None = None
    draft_config: ModelConfig | None = None


def load_devices(args: EngineArgs) -> Devices:
    """Load the models, take their memory, compose their runners. Raises CheckpointError or ValueError."""
    _refuse_absent_gpu(str(args.device))
    args, sizes = _settled(args)
    tokenizer = _tokenizer_of(args)
    slots = None
    if args.enable_lora:
        slots = AdapterSlots(args.max_loras, args.max_lora_rank, sizes.max_num_batched_tokens)
    model = _load(args, sizes, args.model, args.dtype, args.quantization, slots)
    parameter, longest = next(model.parameters()), model.config.max_positions
    sizes = replace(sizes, max_model_len=sizes.max_model_len or longest)
    if sizes.max_model_len > longest:  # said before memory is taken for it
        raise ValueError(f"max_model_len={sizes.max_model_len}: the model sees {longest} tokens")
    how = SpeculativeConfig.of(args.speculative_config) if args.speculative_config is not None else None
    draft = _draft_of(args, sizes, how.model, model) if how and how.model is not None else None
    # 1. Memory for keys and values; a draft model's are more layers over the same plan.
    configs = [model.config] if draft is None else [model.config, draft.config]
    shared = kv_cache_bytes(args, configs, sizes, parameter)
    args = replace(args, kv_cache_memory_bytes=max(1, shared), gpu_memory_utilization=None)
    memory, *others = (make_memory(args, config, sizes, parameter, configs) for config in configs)
    # 2. A runner for each model.
    runner = _runner(args, model, memory, sizes, how.num_speculative_tokens + 1 if how else 1)
    runner.scores = [*logprobs_of(tokenizer, model.logits)]
    if slots:
        runner.before.append(slots.prepare)
    proposals, reader = Proposals(), None
    if how:
        runner.select = RejectionSampler(proposals, runner.select)
    if draft is not None:
        # It reads what came since it was asked: mostly a token, two when all its guesses stood.
        reader = _runner(args, draft, others[0], sizes, new=2, in_flight=CHAIN)
        reader.select = DraftSampler(proposals)
        runner.before.append(lambda batch: others[0].apply(batch.copies))
    return Devices(
        args,
        tokenizer,
        model.config,
        sizes,
        memory,
        runner,
        slots,
        how,
        proposals,
        reader,
        draft.config if draft is not None else None,
    )


def _refuse_absent_gpu(device: str) -> None:
    """Raises ValueError for cuda or cuda:N where there is no such GPU."""
    kind, _, index = device.partition(":")
    number = torch.cuda.device_count() if kind == "cuda" else 0
    if kind == "cuda" and int(index or 0) >= number:
        here = f"GPUs here: {number}, from cuda:0 on" if number else "PyTorch sees no GPU here"
        raise ValueError(
            f"device={device!r}: {here}; leave --device out; ruvon doctor says what this machine has"
        )


def _tokenizer_of(args: EngineArgs) -> Tokenizer:
    """Raises CheckpointError, which also says that there is an option, if none was chosen."""
    folder = resolve(args.tokenizer or args.model)
    try:
        return Tokenizer.from_pretrained(folder)
    except CheckpointError as error:
        if args.tokenizer is not None:
            raise
        raise CheckpointError(f"{error}; --tokenizer takes another folder") from None


def _settled(args: EngineArgs) -> tuple[EngineArgs, Sizes]:
    """What was left open, by what there is here; but how long a sequence may be (0) the model says."""
    gpu = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0) and find_spec("triton")
    device = ("cuda" if gpu else "cpu") if args.device == "auto" else args.device
    on_gpu = str(device).startswith("cuda")
    seats, tokens = args.max_num_seqs, args.max_num_batched_tokens
    if seats is None:  # each needs a token in every step
        seats = min(256 if on_gpu else 16, tokens or sys.maxsize)
    tokens = tokens or max(seats, 8192 if on_gpu else 512)
    settled = replace(
        args,
        device=device,
        attention=("triton" if on_gpu else "sdpa") if args.attention == "auto" else args.attention,
        max_num_seqs=seats,
        max_num_batched_tokens=tokens,
        async_scheduling=on_gpu if args.async_scheduling is None else args.async_scheduling,
    )
    return settled, Sizes(seats, tokens, args.max_model_len or 0)


def _load(
    args: EngineArgs,
    sizes: Sizes,
    model: str | Path,
    dtype: str | torch.dtype,
    quantization: str | None = None,
    slots: AdapterSlots | None = None,
) -> LanguageModel:
    """The model, ready; on a CPU its weights are on huge pages."""
    ready = partial(_ready, args=args, sizes=sizes, quantization=quantization, slots=slots)
    with huge_pages() if str(args.device).startswith("cpu") else nullcontext():
        return load_model(model, args.device, dtype, args.load_format, transform=ready)


def _ready(
    model: LanguageModel,
    args: EngineArgs,
    sizes: Sizes,
    quantization: str | None,
    slots: AdapterSlots | None,
) -> LanguageModel:
    """What is done to a model that has been loaded: quantize, wrap, and packing comes last."""
    if quantization is not None:
        model = quantize(model, quantization)
    if slots is not None:
        device = next(model.parameters()).device
        free, total = memory_of(device)  # what a CPU's system keeps of files is there, too
        need, there = slots.num_bytes(model), free if device.type == "cuda" else total
        if need > there:
            raise ValueError(
                f"max_loras={args.max_loras} of max_lora_rank={args.max_lora_rank} need {need:,} bytes; "
                f"there are {there:,}"
            )
        model = slots.wrap(model)
    return pack_quantized(pack_linears(model, rows=sizes.max_num_seqs))


def _draft_of(args: EngineArgs, sizes: Sizes, name: str | Path, model: LanguageModel) -> LanguageModel:
    """The draft model, without adapters. Raises CheckpointError or ValueError."""
    draft = _load(args, sizes, name, next(model.parameters()).dtype)
    if draft.config.vocab_size != model.config.vocab_size:
        raise ValueError(
            f"speculative_config: {name} has {draft.config.vocab_size} tokens, and {args.model} "
            f"{model.config.vocab_size}: they must share a tokenizer"
        )
    return draft


def _runner(
    args: EngineArgs, model: LanguageModel, memory: Memory, sizes: Sizes, new: int, in_flight: int = 2
) -> ModelRunner:
    """Who computes steps with up to `new` tokens of a sequence, prompts apart. `in_flight`: how many may be
    submitted before the first is read.
    """
    device = next(model.parameters()).device
    last = LastTokens(sizes.max_num_seqs, device)
    if not (_as_graphs(args) and isinstance(memory, PageMemory)):
        return ModelRunner([EagerWay(model, memory, upload=last.upload)], memory, last=last)
    # With kernels that read pages, passes of few rows run as graphs, where there is a GPU.
    from engine.execution.graphs import DecodeGraphs, GraphWay  # here: triton is optional
    from engine.execution.steps import steps, verifying_steps
    from engine.execution.verifying import num_rows
    from engine.kernels.llama_prompts import prompts
    from engine.kernels.verify_attend import MOST_NEW

    V, seats = model.config.vocab_size, sizes.max_num_seqs
    width = -(-sizes.max_model_len // memory.block_size)  # blocks of the longest sequence

    def graphs(make_steps: Callable, rows: int) -> DecodeGraphs:
        step = make_steps(model, memory, rows)
        return DecodeGraphs(step, last, V, rows, width, device.type == "cuda", in_flight)

    ways: list[Way] = [GraphWay(graphs(steps, seats), V)]
    if new > 1:
        rows = num_rows(seats, new, sizes.max_num_batched_tokens)
        ways.append(GraphWay(graphs(verifying_steps, rows), V, most_new=MOST_NEW))
    ways.append(EagerWay(model, memory, prompts(model), last.upload))
    return ModelRunner(ways, memory, last=last)


def _as_graphs(args: EngineArgs) -> bool:
    return args.attention == "triton" and args.kv_cache == "paged" and not args.enforce_eager
