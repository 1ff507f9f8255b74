"""`LLM`: the engine in two lines, for scripts. Part 20's wiring: it knows every part so that none needs to.

    llm = LLM("storyteller")
    print(llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=50))[0].outputs[0].text)

Promises vLLM's names and shapes. So far: one request at a time, with Part 3's cache.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from engine.cache.single import CachedForward
from engine.decoding.greedy import Step, decode_steps, generate
from engine.decoding.outputs import RequestOutput
from engine.decoding.params import ParameterError, SamplingParams
from engine.decoding.prompts import Prompt
from engine.layers.packed_linear import pack_linears
from engine.models.loader import load_model
from engine.tokenizer import Tokenizer

PromptInput = str | dict  # text, or vLLM's {"prompt_token_ids": [...]} or {"prompt": "..."}


class LLM:
    """A model, its tokenizer and everything between them."""

    def __init__(
        self,
        model: str | Path = "storyteller",
        *,
        tokenizer: str | Path | None = None,
        device: str | torch.device = "cpu",
        dtype: str | torch.dtype = "auto",
        load_format: str = "auto",
    ) -> None:
        """Load `model` (an embedded name, a folder or a hub id). Raises CheckpointError or ValueError."""
        start = time.perf_counter()
        self.tokenizer = Tokenizer.from_pretrained(tokenizer or model)
        self.model = load_model(
            model, device=device, dtype=dtype, load_format=load_format, transform=pack_linears
        )
        self.config = self.model.config
        self.load_seconds = time.perf_counter() - start

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """One RequestOutput per prompt, in order. One SamplingParams serves all prompts, or one each.

        Raises ParameterError for a field or prompt that is refused, before anything is generated for it.
        """
        prompts = [prompts] if isinstance(prompts, (str, dict)) else list(prompts)
        one_for_all = sampling_params is None or isinstance(sampling_params, SamplingParams)
        params = [sampling_params] * len(prompts) if one_for_all else list(sampling_params)
        if len(params) != len(prompts):
            raise ParameterError(
                "sampling_params", f"sampling_params has {len(params)} entries for {len(prompts)} prompts"
            )
        return [
            generate(self._forward(), self.tokenizer, self.config, _prompt(prompt), param, request_id=str(i))
            for i, (prompt, param) in enumerate(zip(prompts, params, strict=True))
        ]

    def stream(self, prompt: PromptInput, sampling_params: SamplingParams | None = None) -> Iterator[Step]:
        """One prompt, token by token."""
        return decode_steps(self._forward(), self.tokenizer, self.config, _prompt(prompt), sampling_params)

    def _forward(self) -> CachedForward:
        return CachedForward(self.model)


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
