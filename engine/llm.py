"""`LLM` and `EngineArgs`: every part put together. Part 20's wiring knows them all, so that none needs to.

    llm = LLM("storyteller")
    print(llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=50))[0].outputs[0].text)

Promises vLLM's names and shapes. So far: continuous batching over slots, on weights packed for the processor.
"""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

import torch

from engine.attention.kernels import NAMES as ATTENTION
from engine.attention.kernels import attention_kernel
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
from engine.scheduling.continuous import ContinuousScheduler
from engine.scoring import ScoringExecutor
from engine.tokenizer import Tokenizer

PromptInput = str | dict  # text, or vLLM's {"prompt_token_ids": [...]} or {"prompt": "..."}
MEMORY_SHARE = 0.5  # of what is free once the model is loaded, for keys and values


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """How to build an engine; names are vLLM's."""

    model: str | Path = "storyteller"
    tokenizer: str | Path | None = None  # default: the model's own
    device: str | torch.device = "cpu"
    dtype: str | torch.dtype = "auto"
    load_format: str = "auto"
    max_model_len: int | None = None  # prompt and output; default: what the model sees
    max_num_seqs: int = 16  # requests running at once
    max_num_batched_tokens: int = 512  # tokens in one step
    attention: str = "sdpa"  # eager, tiled, sdpa or triton

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: at least 1 is accepted")
        if self.attention not in ATTENTION:  # before a model is loaded; what cannot run here, after
            raise ValueError(f"attention={self.attention!r}: {', '.join(ATTENTION)} are accepted")
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs={self.max_num_seqs} is more than max_num_batched_tokens="
                f"{self.max_num_batched_tokens}: each running request needs a token in every step"
            )


def build_engine(args: EngineArgs, listeners: Sequence[Listener] = ()) -> LLMEngine:
    """Load the model and compose the parts. Raises CheckpointError or ValueError."""
    tokenizer = Tokenizer.from_pretrained(args.tokenizer or args.model)
    pack = partial(pack_linears, rows=args.max_num_seqs)
    model = load_model(args.model, args.device, args.dtype, args.load_format, transform=pack)
    parameter = next(model.parameters())
    kernel = attention_kernel(args.attention, model.config.head_dim, parameter.device, parameter.dtype)
    slot_tokens = args.max_model_len or model.config.max_positions
    num_slots = min(args.max_num_seqs, _slots_in_memory(model.config, slot_tokens, parameter))
    cache = SlotCache(model.config, num_slots, slot_tokens, parameter.device, parameter.dtype, kernel)
    scheduler = ContinuousScheduler(cache, args.max_num_seqs, args.max_num_batched_tokens)
    executor = ScoringExecutor(ModelForward(model, cache), tokenizer)
    supports = SUPPORTS | {"priority"}
    return LLMEngine(
        tokenizer,
        model.config,
        scheduler,
        executor,
        Listeners(listeners),
        supports=supports,
        max_model_len=slot_tokens,
    )


def _slots_in_memory(config: ModelConfig, slot_tokens: int, parameter: torch.Tensor) -> int:
    """How many slots the free memory holds. Raises ValueError: not even one."""
    if parameter.is_cuda:
        free, _ = torch.cuda.mem_get_info(parameter.device)
    else:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    slot_bytes = slot_tokens * config.kv_bytes_per_token(parameter.element_size())
    if slot_bytes > free * MEMORY_SHARE:
        raise ValueError(
            f"max_model_len={slot_tokens} needs {slot_bytes:,} bytes of cache; {free:,} are free"
        )
    return int(free * MEMORY_SHARE / slot_bytes)


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
