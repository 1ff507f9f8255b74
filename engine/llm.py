"""`LLM`: prompts in, outputs back, with vLLM's names and shapes. Part 20.

    llm = LLM("storyteller")
    print(llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=50))[0].outputs[0].text)

Continuous batching over pages or slots, on packed weights; what else there is, EngineArgs says.
"""

import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

from engine.compose import build_engine
from engine.decoding.outputs import RequestOutput
from engine.decoding.params import ParameterError, SamplingParams
from engine.decoding.prompts import Prompt
from engine.engine_args import EngineArgs
from engine.lora.manager import AdapterManager
from engine.lora.on_demand import OnDemand
from engine.lora.request import LoRARequest

PromptInput = str | dict  # text, or vLLM's {"prompt_token_ids": [...]} or {"prompt": "..."}


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
        lora = isinstance(self.engine.adapters, AdapterManager)
        self._on_demand = OnDemand(self.engine.adapters, self.config) if lora else None
        self._numbers = count()
        self._inbox: dict[str, RequestOutput] = {}  # not read yet

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """One RequestOutput per prompt, in order. One SamplingParams serves all prompts, or one each; so does
        one LoRARequest, which needs enable_lora.

        Raises ParameterError for a field or a prompt that is refused, CheckpointError for an adapter: then
        nothing was generated.
        """
        prompts = [prompts] if isinstance(prompts, (str, dict)) else list(prompts)
        one_for_all = sampling_params is None or isinstance(sampling_params, SamplingParams)
        params = [sampling_params] * len(prompts) if one_for_all else list(sampling_params)
        one_for_all = lora_request is None or isinstance(lora_request, LoRARequest)
        loras = [lora_request] * len(prompts) if one_for_all else list(lora_request)
        for name, given in {"sampling_params": params, "lora_request": loras}.items():
            if len(given) != len(prompts):
                raise ParameterError(name, f"{name} has {len(given)} entries for {len(prompts)} prompts")
        keys = self._adapters(loras)
        ids: list[str] = []
        try:
            for prompt, param, key in zip(prompts, params, keys, strict=True):
                ids.append(self._add(prompt, param, key))
            done = {output.request_id: output for output in self._run(ids) if output.finished}
        finally:
            self._forget(ids)
        return [done[request_id] for request_id in ids]

    def stream(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[RequestOutput]:
        """One prompt; its output so far after every token. Several streams may be read in turns.

        Raises ParameterError, at the first output asked for, for a field or a prompt that is refused.
        """
        request_id = self._add(prompt, sampling_params, *self._adapters([lora_request]))
        try:
            yield from self._run([request_id])
        finally:
            self._forget([request_id])

    def _adapters(self, wanted: Sequence[LoRARequest | None]) -> list[str | None]:
        """What the engine calls them. Raises ParameterError, CheckpointError."""
        if self._on_demand is None and any(wanted):
            raise ParameterError("lora_request", "lora_request needs LLM(..., enable_lora=True)")
        return self._on_demand.keys(wanted) if self._on_demand else [None] * len(wanted)

    def _add(self, prompt: PromptInput, params: SamplingParams | None, adapter: str | None) -> str:
        request_id = str(next(self._numbers))
        self.engine.add_request(request_id, _prompt(prompt), params, adapter=adapter)
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
