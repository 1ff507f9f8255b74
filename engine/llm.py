"""`LLM` and `EngineArgs`: every part put together. Part 20's wiring knows them all, so that none needs to.

    llm = LLM("storyteller")
    print(llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=50))[0].outputs[0].text)

Promises vLLM's names and shapes. So far: continuous batching over pages or slots, on packed weights.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from engine.ahead import AheadEngine, AheadExecutor, AheadForward, LastTokens
from engine.attention.kernels import NAMES as ATTENTION
from engine.attention.kernels import attention_kernel
from engine.cache.manager import KVCacheManager
from engine.cache.paged import PagedCache, PreemptionMode
from engine.cache.slots import SlotCache
from engine.config import ModelConfig
from engine.decoding.logprobs import SUPPORTS
from engine.decoding.outputs import RequestOutput
from engine.decoding.params import ParameterError, SamplingParams
from engine.decoding.prompts import Prompt
from engine.executor import ModelForward
from engine.layers.packed_linear import pack_linears
from engine.listeners import Listener, Listeners
from engine.llm_engine import LLMEngine
from engine.models.loader import load_model
from engine.scheduling.elastic import ElasticScheduler
from engine.scoring import ScoringExecutor
from engine.speculation.config import SpeculativeConfig
from engine.speculation.draft_model import DraftModel
from engine.speculation.executor import Lookup, SpeculativeExecutor
from engine.speculation.lengths import Lengths
from engine.speculation.ngram import lookup
from engine.speculation.paired import PairedCache
from engine.speculation.verify import Verifier
from engine.tokenizer import Tokenizer

KVCache = Literal["paged", "slots"]
PromptInput = str | dict  # text, or vLLM's {"prompt_token_ids": [...]} or {"prompt": "..."}
MEMORY_SHARE = 0.5  # of what is free once the model is loaded, for keys and values
DEFAULT_BLOCK_SIZE = 16
_MODES = (*get_args(PreemptionMode), None)


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """How to build an engine; names are vLLM's."""

    model: str | Path = "storyteller"
    tokenizer: str | Path | None = None  # default: the model's own
    device: str | torch.device = "auto"  # a CUDA GPU that our kernels run on, else the CPU
    dtype: str | torch.dtype = "auto"
    load_format: str = "auto"
    max_model_len: int | None = None  # prompt and output; default: what the model sees
    max_num_seqs: int | None = None  # requests running at once; default: 16, on a GPU 256
    max_num_batched_tokens: int | None = None  # tokens in one step; default: 512, on a GPU 8192
    attention: str = "auto"  # eager, tiled, sdpa or triton; default: triton on a GPU, sdpa on a CPU
    kv_cache: KVCache = "paged"  # or slots of max_model_len tokens, one for each running request
    kv_cache_memory_bytes: int | None = None  # for keys and values; default: `_memory_bytes`
    block_size: int | None = None  # tokens in a block; default: 16
    enable_prefix_caching: bool | None = None  # default: with pages
    swap_space: float = 0  # GiB of CPU memory for preempted sequences
    preemption_mode: PreemptionMode | None = None  # default: who has computed much is swapped, if it fits
    enforce_eager: bool = False  # no CUDA graphs
    async_scheduling: bool | None = None  # launch a step before the last one's tokens are read; default: GPU
    speculative_config: Mapping[str, Any] | None = None  # SpeculativeConfig's fields; default: no speculation

    def __post_init__(self) -> None:
        numbers = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes")
        for name in (*numbers, "block_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: at least 1 is accepted")
        for name, accepted in {"kv_cache": get_args(KVCache), "preemption_mode": _MODES}.items():
            if getattr(self, name) not in accepted:
                options = ", ".join(map(str, accepted))
                raise ValueError(f"{name}={getattr(self, name)!r}: accepted are {options}")
        if not 0 <= self.swap_space < float("inf"):
            raise ValueError(f"swap_space={self.swap_space}: a number of GiB is accepted, 0 or more")
        if self.preemption_mode == "swap" and not self.swap_space:
            raise ValueError("preemption_mode='swap' needs a swap_space; it is 0")
        for name in ("block_size", "enable_prefix_caching", "swap_space", "preemption_mode"):
            if self.kv_cache == "slots" and getattr(self, name):
                raise ValueError(f"{name}={getattr(self, name)!r} needs kv_cache='paged'; it is 'slots'")
        if self.speculative_config is not None:
            SpeculativeConfig.of(self.speculative_config)
            if self.async_scheduling:
                raise ValueError(
                    "async_scheduling=True cannot be had with a speculative_config: proposals are made "
                    "from the last tokens"
                )
        if self.attention not in ("auto", *ATTENTION):  # what cannot run here is found out later
            raise ValueError(f"attention={self.attention!r}: auto, {', '.join(ATTENTION)} are accepted")
        if None not in (seats := self.max_num_seqs, self.max_num_batched_tokens) and (
            seats > self.max_num_batched_tokens
        ):
            raise ValueError(
                f"max_num_seqs={self.max_num_seqs} is more than max_num_batched_tokens="
                f"{self.max_num_batched_tokens}: each running request needs a token in every step"
            )


def build_engine(args: EngineArgs, listeners: Sequence[Listener] = ()) -> LLMEngine:
    """Load the model and compose the parts. Raises CheckpointError or ValueError."""
    args = _settled(args)
    tokenizer = Tokenizer.from_pretrained(args.tokenizer or args.model)
    pack = partial(pack_linears, rows=args.max_num_seqs)
    model = load_model(args.model, args.device, args.dtype, args.load_format, transform=pack)
    parameter = next(model.parameters())
    max_model_len = args.max_model_len or model.config.max_positions
    listeners = Listeners(listeners)
    if args.speculative_config is None:
        cache = _make_cache(args, model.config, max_model_len, parameter)
        executor = _make_executor(args, model, cache, max_model_len, tokenizer)
    else:
        executor = _speculating(args, model, max_model_len, tokenizer)
        cache = executor.cache
        listeners.add(executor.lengths)
    scheduler = ElasticScheduler(cache, args.max_num_seqs, args.max_num_batched_tokens)
    supports = SUPPORTS | {"priority"} | ({"cache_salt"} if args.kv_cache == "paged" else set())
    engine = AheadEngine if args.async_scheduling else LLMEngine
    return engine(
        tokenizer,
        model.config,
        scheduler,
        executor,
        listeners,
        recover=scheduler.recover,
        supports=supports,
        max_model_len=max_model_len,
    )


def _settled(args: EngineArgs) -> EngineArgs:
    """What was left open, by what there is here."""
    gpu = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0) and find_spec("triton")
    device = ("cuda" if gpu else "cpu") if args.device == "auto" else args.device
    on_gpu = str(device).startswith("cuda")
    seats = args.max_num_seqs or (256 if on_gpu else 16)
    return replace(
        args,
        device=device,
        attention=("triton" if on_gpu else "sdpa") if args.attention == "auto" else args.attention,
        max_num_seqs=seats,
        max_num_batched_tokens=args.max_num_batched_tokens or max(seats, 8192 if on_gpu else 512),
        async_scheduling=on_gpu and args.speculative_config is None
        if args.async_scheduling is None
        else args.async_scheduling,
    )


def _make_executor(
    args: EngineArgs, model: nn.Module, cache: KVCacheManager, max_model_len: int, tokenizer: Tokenizer
) -> ScoringExecutor:
    """Who runs the steps: with kernels that read pages, decode steps run as graphs, where there is a GPU."""
    device = next(model.parameters()).device
    last = LastTokens(args.max_num_seqs, device)
    if args.attention == "triton" and args.kv_cache == "paged" and not args.enforce_eager:
        from engine.graphs import GraphForward  # here: triton is optional

        forward = GraphForward(model, cache, last, max_model_len, capture=device.type == "cuda")
        return AheadExecutor(forward, tokenizer, last, sampler=forward.choose)
    if args.async_scheduling:
        return AheadExecutor(AheadForward(model, cache, last), tokenizer, last)
    return ScoringExecutor(ModelForward(model, cache), tokenizer)


def _speculating(
    args: EngineArgs, model: nn.Module, max_model_len: int, tokenizer: Tokenizer
) -> SpeculativeExecutor:
    """Who proposes and who verifies, with a cache for each model. Raises CheckpointError or ValueError."""
    how, parameter = SpeculativeConfig.of(args.speculative_config), next(model.parameters())
    if how.method == "ngram":
        cache = _make_cache(args, model.config, max_model_len, parameter)
        proposer = Lookup(partial(lookup, longest=how.prompt_lookup_max, shortest=how.prompt_lookup_min))
        verifier = Verifier({})
    else:
        pack = partial(pack_linears, rows=args.max_num_seqs)
        draft = load_model(how.model, args.device, parameter.dtype, args.load_format, transform=pack)
        if draft.config.vocab_size != model.config.vocab_size:
            raise ValueError(
                f"speculative_config: {how.model} has {draft.config.vocab_size} tokens, and {args.model} "
                f"{model.config.vocab_size}: they must share a tokenizer"
            )
        both = model.config, draft.config
        args = replace(args, kv_cache_memory_bytes=_room(args, both, max_model_len, parameter))
        cache = PairedCache(*(_make_cache(args, one, max_model_len, parameter, both) for one in both))
        proposer = DraftModel(draft, cache)
        verifier = Verifier(proposer.probs)
    inner = ScoringExecutor(ModelForward(model, cache), tokenizer, verifier)
    return SpeculativeExecutor(inner, cache, proposer, Lengths(how.num_speculative_tokens))


def _make_cache(
    args: EngineArgs,
    config: ModelConfig,
    max_model_len: int,
    parameter: torch.Tensor,
    together: Sequence[ModelConfig] = (),
) -> KVCacheManager:
    """Pages or slots, as many as the memory for them holds; `together`: all models that share the memory.
    Raises ValueError: no room for one sequence.
    """
    kernel = attention_kernel(args.attention, config.head_dim, parameter.device, parameter.dtype)
    token_bytes = sum(one.kv_bytes_per_token(parameter.element_size()) for one in together or (config,))
    room = _room(args, together or (config,), max_model_len, parameter)
    if room < max_model_len * token_bytes:
        raise ValueError(
            f"max_model_len={max_model_len} needs {max_model_len * token_bytes:,} bytes of cache; "
            f"there are {room:,}"
        )
    how = parameter.device, parameter.dtype, kernel
    if args.kv_cache == "slots":
        num_slots = min(args.max_num_seqs, room // (max_model_len * token_bytes))
        return SlotCache(config, num_slots, max_model_len, *how)
    block_size = args.block_size or DEFAULT_BLOCK_SIZE
    num_blocks = max(room // (block_size * token_bytes), -(-max_model_len // block_size))
    return PagedCache(
        config,
        num_blocks,
        block_size,
        *how,
        enable_prefix_caching=args.enable_prefix_caching is not False,
        num_swap_blocks=int(args.swap_space * 2**30) // (block_size * token_bytes),
        preemption_mode=args.preemption_mode,
        **_kernels_for_pages(args.attention),
    )


def _kernels_for_pages(attention: str) -> dict[str, Callable]:
    """Who reads pages; by default PyTorch does."""
    if attention != "triton":
        return {}
    from engine.kernels.paged_attention import PagedAttention
    from engine.kernels.paged_prefill import PagedPrefill

    return {"decode": PagedAttention, "prefill": PagedPrefill}


def _room(
    args: EngineArgs, configs: Sequence[ModelConfig], max_model_len: int, parameter: torch.Tensor
) -> int:
    """Bytes for the keys and values of these models."""
    token_bytes = sum(config.kv_bytes_per_token(parameter.element_size()) for config in configs)
    most = args.max_num_seqs * max_model_len * token_bytes
    return args.kv_cache_memory_bytes or _memory_bytes(most, parameter)


def _memory_bytes(most: int, parameter: torch.Tensor) -> int:
    """A share of what is free, for keys and values; on a CPU, others use that memory, too: not more than
    `most`, with which no request ever waits for memory.
    """
    if parameter.is_cuda:
        return int(torch.cuda.mem_get_info(parameter.device)[0] * MEMORY_SHARE)
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return min(most, int(free * MEMORY_SHARE))


class LLM:
    """Offline use: prompts in, outputs back."""

    def __init__(self, model: str | Path = "storyteller", **options) -> None:
        """`options`: the fields of EngineArgs. Raises CheckpointError, ValueError, or TypeError for an
        unknown one.
        """
        start = time.perf_counter()
        self.engine = build_engine(EngineArgs(model=model, **options))
        self.tokenizer, self.config = self.engine.tokenizer, self.engine.config
        self.load_seconds = time.perf_counter() - start
        self._numbers = count()
        self._inbox: dict[str, RequestOutput] = {}  # not read yet

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """One RequestOutput per prompt, in order. One SamplingParams serves all prompts, or one each.

        Raises ParameterError for a field or a prompt that is refused: then nothing was generated.
        """
        prompts = [prompts] if isinstance(prompts, (str, dict)) else list(prompts)
        one_for_all = sampling_params is None or isinstance(sampling_params, SamplingParams)
        params = [sampling_params] * len(prompts) if one_for_all else list(sampling_params)
        if len(params) != len(prompts):
            raise ParameterError(
                "sampling_params", f"sampling_params has {len(params)} entries for {len(prompts)} prompts"
            )
        ids: list[str] = []
        try:
            for prompt, param in zip(prompts, params, strict=True):
                ids.append(self._add(prompt, param))
            done = {output.request_id: output for output in self._run(ids) if output.finished}
        finally:
            self._forget(ids)
        return [done[request_id] for request_id in ids]

    def stream(
        self, prompt: PromptInput, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """One prompt; its output so far after every token. Several streams may be read in turns.

        Raises ParameterError, at the first output asked for, for a field or a prompt that is refused.
        """
        request_id = self._add(prompt, sampling_params)
        try:
            yield from self._run([request_id])
        finally:
            self._forget([request_id])

    def _add(self, prompt: PromptInput, params: SamplingParams | None) -> str:
        request_id = str(next(self._numbers))
        self.engine.add_request(request_id, _prompt(prompt), params)
        return request_id

    def _run(self, ids: list[str]) -> Iterator[RequestOutput]:
        """Outputs of these requests until all have finished. Raises RuntimeError when a step failed."""
        unfinished = set(ids)
        while unfinished:
            if not any(request_id in self._inbox for request_id in unfinished):
                # A step serves everyone: what belongs to another stream waits there for its reader.
                self._inbox |= {output.request_id: output for output in self.engine.step()}
            for request_id in [request_id for request_id in ids if request_id in self._inbox]:
                output = self._inbox.pop(request_id)
                if output.error:
                    raise RuntimeError(f"request {request_id} failed: {output.error}")
                if output.finished:
                    unfinished.discard(request_id)
                yield output

    def _forget(self, ids: list[str]) -> None:
        """Nothing stays behind of requests that were left early, or failed."""
        for request_id in ids:
            self.engine.abort_request(request_id)
            self._inbox.pop(request_id, None)
        while self.engine.has_unfinished_requests() and not self.engine.unfinished_request_ids():
            self.engine.step()  # one step ahead, a last step has still to land


def _prompt(prompt: PromptInput) -> Prompt:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, dict):
        for key in ("prompt_token_ids", "prompt"):
            if key in prompt:
                return prompt[key]
    raise ParameterError(
        "prompt", f"prompt={prompt!r}: text, or a dict with prompt_token_ids or prompt, is accepted"
    )
