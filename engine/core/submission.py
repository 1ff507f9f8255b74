"""A request as one user sent it: its checks, its samples, and their outputs as one. Part 6.

A user asks for `n` samples of one prompt. The scheduler sees each sample as a `Request` of its own. This
module makes these requests, and puts their outputs together again. It knows no scheduler and no step.
"""

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.decoding.bad_words import bad_words_of
from engine.decoding.outputs import CompletionOutput, Logprobs, RequestOutput, Snapshot
from engine.decoding.params import ParameterError, SamplingParams
from engine.decoding.prompts import Prompt, prompt_token_ids
from engine.decoding.sampling_state import SamplingState, allowed_mask, seed_of
from engine.decoding.stopping import GrowingOutput
from engine.models.config import ModelConfig
from engine.requests.request import Request
from engine.text.tokenizer import Tokenizer

MAX_PRIORITY = 100


@dataclass
class Submission:
    """The `n` samples of one user's request, until all of them have finished."""

    prompt: str | None  # None if the user sent token ids
    samples: list[Request]
    adapter: Any = None  # as the user named it
    prompt_logprobs: Logprobs | None = None  # kept here once complete: a preempted request forgets its own

    def output(self, request_id: str) -> RequestOutput:
        """The output of all samples so far. A list that has stopped growing is copied, and one that still
        grows is a `Snapshot`.

        This is called for each request of each step, so it calls few functions, and none with keywords.
        """
        completions: list[CompletionOutput] = []
        finished = True
        failed: Request | None = None  # the first sample that has failed
        for index, request in enumerate(self.samples):
            output, reason = request.output, request.output.finish_reason
            if reason is None:
                finished = False
            snapshot: Callable[[list], Sequence] = list if reason else Snapshot
            completion = CompletionOutput(
                index, output.visible, snapshot(output.token_ids), reason, output.stop_reason
            )
            if request.logprobs:
                completion.cumulative_logprob = request.cumulative_logprob
                completion.logprobs = snapshot(request.logprobs)
                completion.text_offsets = snapshot(request.text_offsets)
            completions.append(completion)
            if request.error and failed is None:
                failed = request
        first = self.samples[0]
        scores = first.prompt_logprobs
        if scores and self.prompt_logprobs is None and len(scores) == first.num_prompt_tokens:
            self.prompt_logprobs = scores
        return RequestOutput(
            request_id,
            self.prompt,
            first.sampling.prompt_ids,
            completions,
            finished,
            self.prompt_logprobs,
            first.num_cached_tokens,
            failed.error if failed else None,  # error
            first.stats,
            self.adapter,  # lora_request
            failed.error_field if failed else None,  # error_field
        )


def refuse_options(supports: frozenset[str], priority: int, adapter: Any, cache_salt: str | None) -> None:
    """Raise ParameterError for an option that is set and not in `supports`, or for a priority that is not
    from -MAX_PRIORITY to MAX_PRIORITY.
    """
    for name, value in {"priority": priority, "adapter": adapter, "cache_salt": cache_salt}.items():
        if value and name not in supports:
            raise ParameterError(name, f"{name}={value!r} is not supported by this engine")
    if abs(priority) > MAX_PRIORITY:
        raise ParameterError(
            "priority", f"priority={priority}: accepted are -{MAX_PRIORITY} to {MAX_PRIORITY}"
        )


def refuse_forked(process_id: int) -> None:
    """Raise RuntimeError if this process is a fork of `process_id` and computes with several threads: a fork
    copies one thread only, and a step would wait for ever for the others.
    """
    if os.getpid() != process_id and torch.get_num_threads() > 1:
        raise RuntimeError(
            "this process was forked from the one that made the engine, without the threads that compute. "
            'Start processes with multiprocessing.get_context("spawn"), or compute with one thread here: '
            "torch.set_num_threads(1)"
        )


def make_samples(
    request_id: str,
    prompt: Prompt,
    params: SamplingParams,
    tokenizer: Tokenizer,
    config: ModelConfig,
    seeds: random.Random | None = None,
    **options,
) -> list[Request]:
    """The `params.n` samples of a request, which keep `params` itself, not a copy.

    `config.max_positions` is the most tokens of prompt and output together. `seeds` gives the seed of a
    request that names none; None takes a random one. `options` are fields of each `Request`. Raises
    ParameterError for a prompt or for bad words that the model cannot take.
    """
    token_ids = prompt_token_ids(prompt, tokenizer, config, truncate=params.truncate_prompt_tokens)
    bad_words = bad_words_of(params, tokenizer, config.vocab_size)
    mask = allowed_mask(params.allowed_token_ids)
    if params.seed is None and seeds is not None:
        seed = seeds.getrandbits(63)
    else:
        seed = seed_of(params)
    samples: list[Request] = []
    for index in range(params.n):
        output = GrowingOutput(
            tokenizer,
            params,
            prompt_length=len(token_ids),
            max_positions=config.max_positions,
            eos_token_ids=config.eos_token_ids,
            bad_words=bad_words,
        )
        stop_ids = (*output.eos_token_ids, *params.stop_token_ids)
        sampling = SamplingState(
            params,
            prompt_ids=token_ids,
            output_ids=output.token_ids,
            seed=seed + index,
            stop_ids=stop_ids,
            bad_words=bad_words,
            mask=mask,
        )
        request = Request(
            id=f"{request_id}/{index}",
            request_id=request_id,
            token_ids=list(token_ids),
            num_prompt_tokens=len(token_ids),
            params=params,
            output=output,
            sampling=sampling,
            parent=samples[0] if samples else None,
            **options,
        )
        samples.append(request)
    return samples
