"""The models that `EngineArgs` names, loaded, each with its memory and its runner. Part 20's wiring.

Promises runners whose every option has its effect, or a CheckpointError or ValueError that says why not. A
model is loaded in this order: merge, quantize, wrap, pack. `compose.py` makes an engine of the result;
`replay.py` runs recorded steps on it without one. The memory is made in `compose_cache.py`.
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
from engine.quantization.checkpoint import restore
from engine.quantization.quantize import pack_quantized, quantize
from engine.speculation.config import MAX_DRAFTS, SpeculativeConfig
from engine.speculation.draft_model import DraftSampler
from engine.speculation.rejection_sampler import DraftProbs, RejectionSampler
from engine.text.tokenizer import Tokenizer
from engine.wiring.compose_cache import Memory, Sizes, kv_cache_bytes, make_memory, memory_of
from engine.wiring.engine_args import EngineArgs

MAX_DRAFT_PASSES = MAX_DRAFTS + 1  # of a draft model, submitted before the host reads the first one's tokens


@dataclass(frozen=True)
class Devices:
    """What `load_devices` made, all of it on one device."""

    args: EngineArgs  # with no option left open: made with these, everything is the same again
    tokenizer: Tokenizer
    config: ModelConfig  # the model's
    sizes: Sizes
    memory: Memory  # the model's keys and values
    runner: ModelRunner  # the model's
    slots: AdapterSlots | None  # None: no adapters
    speculative: SpeculativeConfig | None  # None: no speculation
    draft: ModelRunner | None = None  # the draft model's
    draft_config: ModelConfig | None = None


def load_devices(args: EngineArgs) -> Devices:
    """Load the models, allocate memory for their keys and values, and make a runner for each.

    Raises CheckpointError or ValueError.
    """
    # 1. The options that were left open.
    _refuse_absent_gpu(str(args.device))
    args, sizes = _with_defaults(args)
    tokenizer = _tokenizer_of(args)
    speculative = None
    if args.speculative_config is not None:
        speculative = SpeculativeConfig.from_dict(args.speculative_config)
    slots = None
    if args.enable_lora:
        slots = AdapterSlots(args.max_loras, args.max_lora_rank, sizes.max_num_batched_tokens)
    # 2. The model, and the draft model if there is one.
    model = _load(args, sizes, args.model, args.dtype, args.quantization, slots)
    max_positions = model.config.max_positions
    sizes = replace(sizes, max_model_len=sizes.max_model_len or max_positions)
    if sizes.max_model_len > max_positions:  # said before memory is taken for it
        raise ValueError(f"max_model_len={sizes.max_model_len}: the model sees {max_positions} tokens")
    draft = None
    if speculative is not None and speculative.model is not None:
        draft = _load_draft(args, sizes, speculative.model, model)
    # 3. Memory for keys and values. The draft model's are more layers over the same plan.
    configs = [model.config] if draft is None else [model.config, draft.config]
    parameter = next(model.parameters())  # all memory has its device and dtype
    num_bytes = kv_cache_bytes(args, configs, sizes, parameter)
    args = replace(args, kv_cache_memory_bytes=max(1, num_bytes), gpu_memory_utilization=None)
    memory = make_memory(args, model.config, sizes, parameter, configs)
    # 4. The model's runner, with what adapters, log probabilities and speculation hand in.
    max_new_tokens = speculative.num_speculative_tokens + 1 if speculative else 1
    in_flight = 2 if args.async_scheduling else 1
    runner = _runner(args, model, memory, sizes, max_new_tokens, in_flight)
    runner.scores = [*logprobs_of(tokenizer, model.logits)]
    if slots:
        runner.before.append(slots.prepare)
    draft_probs = DraftProbs()
    if speculative:
        runner.select = RejectionSampler(draft_probs, runner.select)
    if draft is None:
        return Devices(args, tokenizer, model.config, sizes, memory, runner, slots, speculative)
    # 5. The draft model's runner. It reads the tokens since its last pass: mostly one, two when all its
    #    proposals were accepted.
    draft_memory = make_memory(args, draft.config, sizes, parameter, configs)
    runner.before.append(lambda batch: draft_memory.apply(batch.copies))
    draft_runner = _runner(args, draft, draft_memory, sizes, max_new_tokens=2, in_flight=MAX_DRAFT_PASSES)
    draft_runner.select = DraftSampler(draft_probs)
    return Devices(
        args,
        tokenizer,
        model.config,
        sizes,
        memory,
        runner,
        slots,
        speculative,
        draft_runner,
        draft.config,
    )


def _refuse_absent_gpu(device: str) -> None:
    """Raises ValueError for cuda or cuda:N where there is no such GPU."""
    kind, _, index = device.partition(":")
    num_gpus = torch.cuda.device_count() if kind == "cuda" else 0
    if kind == "cuda" and int(index or 0) >= num_gpus:
        gpus = f"GPUs here: {num_gpus}, from cuda:0 on" if num_gpus else "PyTorch sees no GPU here"
        raise ValueError(
            f"device={device!r}: {gpus}; leave --device out; ruvon doctor says what this machine has"
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


def _with_defaults(args: EngineArgs) -> tuple[EngineArgs, Sizes]:
    """The options with values for those that were left open, by what this machine has. `max_model_len` may
    stay 0: what it is then, only the loaded model can say.
    """
    has_gpu = (
        torch.cuda.is_available()
        and torch.cuda.get_device_capability() >= (8, 0)
        and find_spec("triton") is not None
    )
    device, attention, async_scheduling = args.device, args.attention, args.async_scheduling
    if device == "auto":
        device = "cuda" if has_gpu else "cpu"
    on_gpu = str(device).startswith("cuda")
    if attention == "auto":
        attention = "triton" if on_gpu else "sdpa"
    if async_scheduling is None:
        async_scheduling = on_gpu
    max_num_seqs, max_num_batched_tokens = args.max_num_seqs, args.max_num_batched_tokens
    if max_num_seqs is None:  # each needs a token in every step
        max_num_seqs = min(256 if on_gpu else 16, max_num_batched_tokens or sys.maxsize)
    if max_num_batched_tokens is None:
        max_num_batched_tokens = max(max_num_seqs, 8192 if on_gpu else 512)
    with_defaults = replace(
        args,
        device=device,
        attention=attention,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        async_scheduling=async_scheduling,
    )
    return with_defaults, Sizes(max_num_seqs, max_num_batched_tokens, args.max_model_len or 0)


def _load(
    args: EngineArgs,
    sizes: Sizes,
    model: str | Path,
    dtype: str | torch.dtype,
    quantization: str | None = None,
    slots: AdapterSlots | None = None,
) -> LanguageModel:
    """The model, ready to run; on a CPU, on huge pages. Raises CheckpointError or ValueError."""
    transform = partial(_transformed, args=args, sizes=sizes, quantization=quantization, slots=slots)
    with huge_pages() if str(args.device).startswith("cpu") else nullcontext():
        return load_model(
            model, args.device, dtype, args.load_format, transform=transform, restore_quantized=restore
        )


def _transformed(
    model: LanguageModel,
    args: EngineArgs,
    sizes: Sizes,
    quantization: str | None,
    slots: AdapterSlots | None,
) -> LanguageModel:
    """A loaded model, quantized, wrapped for adapters, and packed: the layers that will run are packed last.
    Raises ValueError: no memory for the adapters.
    """
    if quantization is not None:
        model = quantize(model, quantization)
    if slots is not None:
        device = next(model.parameters()).device
        free, total = memory_of(device)
        # A CPU's free memory does not count what the system keeps of files, and gives back when asked.
        available = free if device.type == "cuda" else total
        needed = slots.num_bytes(model)
        if needed > available:
            raise ValueError(
                f"max_loras={args.max_loras} of max_lora_rank={args.max_lora_rank} need {needed:,} bytes; "
                f"there are {available:,}"
            )
        model = slots.wrap(model)
    return pack_quantized(pack_linears(model, rows=sizes.max_num_seqs))


def _load_draft(args: EngineArgs, sizes: Sizes, name: str | Path, model: LanguageModel) -> LanguageModel:
    """The draft model, without adapters. Raises CheckpointError or ValueError."""
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
) -> ModelRunner:
    """A runner for steps with up to `max_new_tokens` of a sequence, prompts apart. `in_flight`: how many
    steps may be submitted before the first is read.
    """
    device = next(model.parameters()).device
    last_tokens = LastTokens(sizes.max_num_seqs, device)
    if not (_runs_graphs(args) and isinstance(memory, PageMemory)):
        if in_flight == 1:  # every token is known when its step is launched
            return ModelRunner([EagerWay(model, memory)], memory)
        return ModelRunner(
            [EagerWay(model, memory, upload=last_tokens.upload)], memory, last_tokens=last_tokens
        )
    from engine.execution.graphs import DecodeGraphs, GraphWay  # here: triton is optional
    from engine.execution.steps import steps, verifying_steps
    from engine.execution.verifying import num_rows
    from engine.kernels.llama_prompts import prompt_forward
    from engine.kernels.verify_attend import MOST_NEW

    V, max_seqs = model.config.vocab_size, sizes.max_num_seqs
    max_blocks = -(-sizes.max_model_len // memory.block_size)  # of a sequence

    def graphs(make_steps: Callable, max_rows: int) -> DecodeGraphs:
        step = make_steps(model, memory, max_rows)
        return DecodeGraphs(
            step, last_tokens, V, max_rows, max_blocks, device.type == "cuda", max(2, in_flight)
        )

    # The first way that fits a step computes it: a graph for a few rows, else kernel by kernel.
    ways: list[Way] = [GraphWay(graphs(steps, max_seqs), V)]
    if max_new_tokens > 1:
        max_rows = num_rows(max_seqs, max_new_tokens, sizes.max_num_batched_tokens)
        ways.append(GraphWay(graphs(verifying_steps, max_rows), V, max_new=MOST_NEW))
    ways.append(EagerWay(model, memory, prompt_forward(model), last_tokens.upload))
    return ModelRunner(ways, memory, last_tokens=last_tokens)


def _runs_graphs(args: EngineArgs) -> bool:
    """Whether steps of few rows run as CUDA graphs, which need kernels that read pages."""
    return args.attention == "triton" and args.kv_cache == "paged" and not args.enforce_eager
