"""An engine from `EngineArgs`: every part put together. Part 20's wiring, the one place that knows them all.

Promises an engine whose every option has its effect, or a CheckpointError or ValueError that says why not.
Order at load: merge, quantize, wrap, pack. The memory for keys and values: engine/compose_cache.py.
"""

import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import torch
from torch import nn

from engine.ahead import AheadEngine, AheadExecutor, AheadForward, LastTokens
from engine.cache.manager import KVCacheManager
from engine.compose_cache import make_cache, memory, room
from engine.decoding.logprobs import SUPPORTS
from engine.engine_args import EngineArgs
from engine.executor import ModelForward, sample_batch
from engine.huge_pages import huge_pages
from engine.layers.packed_linear import pack_linears
from engine.listeners import Listener, Listeners
from engine.llm_engine import LLMEngine
from engine.lora.forward import AdapterForward
from engine.lora.manager import AdapterManager
from engine.lora.slots import AdapterSlots
from engine.models.loader import load_model
from engine.quantization.quantize import pack_quantized, quantize
from engine.scheduling.elastic import ElasticScheduler
from engine.scoring import ScoringExecutor, ScoringForward
from engine.speculation.ahead import (
    AheadSpeculativeEngine,
    AheadSpeculativeExecutor,
    RememberingExecutor,
)
from engine.speculation.config import SpeculativeConfig
from engine.speculation.draft_model import DraftModel
from engine.speculation.executor import Lookup, SpeculativeExecutor
from engine.speculation.lengths import Lengths
from engine.speculation.ngram import lookup
from engine.speculation.paired import PairedCache
from engine.speculation.verify import Verifier
from engine.tokenizer import Tokenizer


def build_engine(args: EngineArgs, listeners: Sequence[Listener] = ()) -> LLMEngine:
    """Load the model and compose the parts. Raises CheckpointError or ValueError."""
    args = _settled(args)
    tokenizer = Tokenizer.from_pretrained(args.tokenizer or args.model)
    slots = None
    if args.enable_lora:
        slots = AdapterSlots(args.max_loras, args.max_lora_rank, args.max_num_batched_tokens)
    model = _load(args, args.model, args.dtype, args.quantization, slots)
    parameter = next(model.parameters())
    max_model_len = args.max_model_len or model.config.max_positions
    if max_model_len > model.config.max_positions:  # said before memory is taken for it
        raise ValueError(f"max_model_len={max_model_len}: the model sees {model.config.max_positions} tokens")
    listeners = Listeners(listeners)
    if args.speculative_config is None:
        cache = make_cache(args, model.config, max_model_len, parameter)
        executor = _make_executor(args, model, cache, max_model_len, tokenizer, slots)
    else:
        executor = _speculating(args, model, max_model_len, tokenizer, slots)
        cache = executor.cache
        listeners.add(executor.lengths)
    scheduler = ElasticScheduler(cache, args.max_num_seqs, args.max_num_batched_tokens)
    supports = SUPPORTS | {"priority"} | ({"cache_salt"} if args.kv_cache == "paged" else set())
    adapters = AdapterManager(slots, scheduler) if slots else ()
    ahead = AheadEngine if args.speculative_config is None else AheadSpeculativeEngine
    engine = ahead if args.async_scheduling else LLMEngine
    return engine(
        tokenizer,
        model.config,
        scheduler,
        executor,
        listeners,
        recover=scheduler.recover,
        supports=supports | ({"adapter"} if slots else set()),
        max_model_len=max_model_len,
        adapters=adapters,
    )


def _settled(args: EngineArgs) -> EngineArgs:
    """What was left open, by what there is here."""
    gpu = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0) and find_spec("triton")
    device = ("cuda" if gpu else "cpu") if args.device == "auto" else args.device
    on_gpu = str(device).startswith("cuda")
    seats, tokens = args.max_num_seqs, args.max_num_batched_tokens
    if seats is None:  # each needs a token in every step
        seats = min(256 if on_gpu else 16, tokens or sys.maxsize)
    return replace(
        args,
        device=device,
        attention=("triton" if on_gpu else "sdpa") if args.attention == "auto" else args.attention,
        max_num_seqs=seats,
        max_num_batched_tokens=tokens or max(seats, 8192 if on_gpu else 512),
        async_scheduling=on_gpu if args.async_scheduling is None else args.async_scheduling,
    )


def _load(
    args: EngineArgs,
    model: str,
    dtype: str | torch.dtype,
    quantization: str | None = None,
    slots: AdapterSlots | None = None,
) -> nn.Module:
    """The model, ready; on a CPU its weights are on huge pages."""
    ready = partial(_ready, args=args, quantization=quantization, slots=slots)
    with huge_pages() if str(args.device).startswith("cpu") else nullcontext():
        return load_model(model, args.device, dtype, args.load_format, transform=ready)


def _ready(
    model: nn.Module, args: EngineArgs, quantization: str | None, slots: AdapterSlots | None
) -> nn.Module:
    """What is done to a model that has been loaded: quantize, wrap, and packing comes last."""
    if quantization is not None:
        model = quantize(model, quantization)
    if slots is not None:
        device = next(model.parameters()).device
        free, total = memory(device)  # what a CPU's system keeps of files is there, too
        need, there = slots.num_bytes(model), free if device.type == "cuda" else total
        if need > there:
            raise ValueError(
                f"max_loras={args.max_loras} of max_lora_rank={args.max_lora_rank} need {need:,} bytes; "
                f"there are {there:,}"
            )
        model = slots.wrap(model)
    return pack_quantized(pack_linears(model, rows=args.max_num_seqs))


def _make_executor(
    args: EngineArgs,
    model: nn.Module,
    cache: KVCacheManager,
    max_model_len: int,
    tokenizer: Tokenizer,
    slots: AdapterSlots | None,
) -> ScoringExecutor:
    """Who runs the steps: with kernels that read pages, decode steps run as graphs, where there is a GPU."""
    device = next(model.parameters()).device
    last = LastTokens(args.max_num_seqs, device)
    if _as_graphs(args):
        from engine.graphs import GraphForward  # here: triton is optional
        from engine.kernels.llama_prompts import prompts
        from engine.kernels.llama_rows import steps

        capture = device.type == "cuda"
        forward = GraphForward(model, cache, last, max_model_len, capture, steps, prompts)
        return AheadExecutor(_with(slots, forward), tokenizer, last, sampler=forward.choose)
    if args.async_scheduling:
        return AheadExecutor(_with(slots, AheadForward(model, cache, last)), tokenizer, last)
    return ScoringExecutor(_with(slots, ModelForward(model, cache)), tokenizer)


def _with(slots: AdapterSlots | None, forward: ScoringForward) -> ScoringForward:
    return AdapterForward(forward, slots) if slots else forward


def _speculating(
    args: EngineArgs,
    model: nn.Module,
    max_model_len: int,
    tokenizer: Tokenizer,
    slots: AdapterSlots | None,
) -> SpeculativeExecutor:
    """Who proposes (without adapters) and who verifies, with a cache for each model. Raises CheckpointError
    or ValueError.
    """
    how, parameter = SpeculativeConfig.of(args.speculative_config), next(model.parameters())
    most = how.num_speculative_tokens
    if how.method == "ngram":
        cache = make_cache(args, model.config, max_model_len, parameter)
        proposer = Lookup(partial(lookup, longest=how.prompt_lookup_max, shortest=how.prompt_lookup_min))
        forward, drawn_from = _target_forward(args, model, cache, max_model_len, most + 1), {}
    else:
        draft = _load(args, how.model, parameter.dtype)
        if draft.config.vocab_size != model.config.vocab_size:
            raise ValueError(
                f"speculative_config: {how.model} has {draft.config.vocab_size} tokens, and {args.model} "
                f"{model.config.vocab_size}: they must share a tokenizer"
            )
        both = model.config, draft.config
        shared = room(args, both, max_model_len, parameter)
        args = replace(args, kv_cache_memory_bytes=shared, gpu_memory_utilization=None)
        cache = PairedCache(*(make_cache(args, one, max_model_len, parameter, both) for one in both))
        forward = _target_forward(args, model, cache.target, max_model_len, most + 1)
        # A draft reads what came since it was asked: mostly a token, two when all its guesses stood.
        reading = _rows_forward(args, draft, cache.draft, max_model_len, 2, chains=True)
        proposer = DraftModel(draft, cache, reading)
        drawn_from = proposer.probs
    verifier = Verifier(drawn_from, getattr(forward, "choose", sample_batch))
    if args.async_scheduling:
        inner = RememberingExecutor(_with(slots, forward), tokenizer, forward.last, sampler=verifier)
    else:
        inner = ScoringExecutor(_with(slots, forward), tokenizer, verifier)
    clock = time.thread_time if parameter.device.type == "cpu" else time.perf_counter
    executor = AheadSpeculativeExecutor if args.async_scheduling else SpeculativeExecutor
    return executor(inner, cache, proposer, Lengths(most), clock)


def _target_forward(
    args: EngineArgs, model: nn.Module, cache: KVCacheManager, max_model_len: int, new: int
) -> ModelForward:
    """Steps with up to `new` tokens of each sequence."""
    if forward := _rows_forward(args, model, cache, max_model_len, new):
        return forward
    if args.async_scheduling:
        return AheadForward(model, cache, LastTokens(args.max_num_seqs, next(model.parameters()).device))
    return ModelForward(model, cache)


def _rows_forward(
    args: EngineArgs,
    model: nn.Module,
    cache: KVCacheManager,
    max_model_len: int,
    new: int,
    chains: bool = False,
) -> AheadForward | None:
    """Passes with up to `new` tokens of each sequence as graphs, where decode steps are; else None: kernel by
    kernel.
    """
    if not _as_graphs(args):
        return None
    from engine.kernels.llama_prompts import prompts
    from engine.kernels.llama_rows import steps, verifying_steps
    from engine.speculation.graphs import RowsForward, num_rows

    seats = args.max_num_seqs
    rows = num_rows(seats, new, args.max_num_batched_tokens)
    capture = next(model.parameters()).is_cuda
    plain = (None, 0) if chains else (steps, seats)
    return RowsForward(model, cache, rows, max_model_len, capture, verifying_steps, prompts, chains, *plain)


def _as_graphs(args: EngineArgs) -> bool:
    """Whether passes with few tokens run as graphs, where there is a GPU: with kernels that read pages."""
    return args.attention == "triton" and args.kv_cache == "paged" and not args.enforce_eager
