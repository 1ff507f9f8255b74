"""The loop every language model runs: predict, choose, append, repeat.

Promises the tokens of Hugging Face's `generate(do_sample=False)`. Knows neither how logits are computed
(`forward` is handed in: everything anew here, with a cache from Part 3 on) nor how to choose otherwise than
by the maximum (`choose` is handed in too: Part 5). Part 2.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.dense import causal
from engine.decoding.outputs import CompletionOutput, FinishReason, RequestOutput, RequestStats
from engine.decoding.params import SamplingParams, refuse_unknown_tokens, refuse_unsupported
from engine.decoding.prompts import Prompt, prompt_token_ids
from engine.decoding.stopping import GrowingOutput
from engine.models.config import ModelConfig
from engine.models.language_model import LanguageModel
from engine.text.tokenizer import Tokenizer

Forward = Callable[[Sequence[int]], Tensor]  # all token ids so far -> logits[V] of the next one
Choose = Callable[[Tensor], int]  # logits[V] -> token id

SUPPORTS: frozenset[str] = frozenset()  # of the fields that later parts bring: none


@dataclass(frozen=True)
class DecodeStep:
    """One turn of the loop."""

    token_id: int
    text: str  # what became safe to show: perhaps nothing, perhaps several characters
    logits: Tensor  # [V], what the choice was made from
    time: float  # seconds, of time.perf_counter()
    output: GrowingOutput  # everything so far

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.output.finish_reason


@dataclass(frozen=True)
class Candidate:
    """One of the likeliest next tokens."""

    token_id: int
    text: str
    probability: float


class FullForward:
    """Logits by running the whole sequence through the model, every time: simple, right, and ever slower."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.device = next(model.parameters()).device

    @torch.inference_mode()
    def __call__(self, token_ids: Sequence[int]) -> Tensor:
        tokens = torch.tensor(token_ids, device=self.device)  # [T]
        positions = torch.arange(len(token_ids), device=self.device)  # [T]
        hidden = self.model(tokens, positions, causal)  # [T, D]
        return self.model.logits(hidden[-1:])[0]  # [V]: only the last token's successor is unknown


def argmax(logits: Tensor) -> int:
    """The likeliest token; the lowest id among equals."""
    return int(logits.argmax())


def decode_steps(
    forward: Forward,
    tokenizer: Tokenizer,
    config: ModelConfig,
    prompt: Prompt,
    params: SamplingParams | None = None,
    choose: Choose = argmax,
    supports: frozenset[str] = SUPPORTS,
) -> Iterator[DecodeStep]:
    """Generate token by token; a `DecodeStep` after each, the last one with a finish reason.

    `prompt` is text or token ids. Raises ParameterError, before the first step, for a field or a prompt it
    refuses.
    """
    params = params or SamplingParams()
    refuse_unsupported(params, supports)
    refuse_unknown_tokens(params, config.vocab_size)
    token_ids = prompt_token_ids(prompt, tokenizer, config)
    output = GrowingOutput(tokenizer, params, len(token_ids), config.max_positions, config.eos_token_ids)
    return _decode(forward, token_ids, output, choose)


def _decode(
    forward: Forward, token_ids: list[int], output: GrowingOutput, choose: Choose
) -> Iterator[DecodeStep]:
    """The loop itself: a DecodeStep per token, until `output` has a finish reason. No forward after the last
    token.

    `token_ids` is the sequence: each new id is appended to this very list, which `forward` reads next.
    `output` takes each id too, and its `visible` says how far the text may be shown; a DecodeStep has what
    was added to it.
    Tokens that `output` bans just now get the logit -inf, in a copy: `forward`'s tensor is its own. The
    DecodeStep carries the logits that the choice was made from, with the bans in them.
    """
    num_shown = 0
    while output.finish_reason is None:
        # 1. What could come next?
        logits = forward(token_ids)  # [V]
        if output.banned_token_ids:
            banned = torch.tensor(output.banned_token_ids, device=logits.device)
            logits = logits.index_fill(0, banned, -torch.inf)
        # 2. Choose, and let the sequence grow by one.
        token_id = choose(logits)
        token_ids.append(token_id)
        # 3. Is that the end? Which text is safe to show?
        output.append(token_id)
        text = output.visible[num_shown:]
        num_shown += len(text)
        yield DecodeStep(token_id, text, logits, time.perf_counter(), output)


def generate(
    forward: Forward,
    tokenizer: Tokenizer,
    config: ModelConfig,
    prompt: Prompt,
    params: SamplingParams | None = None,
    request_id: str = "0",
) -> RequestOutput:
    """`decode_steps` to its end, in one record with the times of its tokens."""
    stats = RequestStats(arrival=time.perf_counter())
    token_ids = prompt_token_ids(prompt, tokenizer, config)
    for step in decode_steps(forward, tokenizer, config, token_ids, params):
        stats.token_times.append(step.time)
    done = step.output
    completion = CompletionOutput(0, done.text, done.token_ids, done.finish_reason, done.stop_reason)
    text = prompt if isinstance(prompt, str) else None
    return RequestOutput(request_id, text, token_ids, [completion], finished=True, stats=stats)


def top_candidates(logits: Tensor, tokenizer: Tokenizer, k: int = 5) -> list[Candidate]:
    """The k likeliest next tokens of logits[V]: a look at what the loop chose from."""
    probabilities, ids = torch.softmax(logits.float(), dim=-1).topk(k)
    return [
        Candidate(id, tokenizer.decode([id]) if id in tokenizer else "", p)
        for id, p in zip(ids.tolist(), probabilities.tolist(), strict=True)
    ]
