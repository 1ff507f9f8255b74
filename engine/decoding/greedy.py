"""The loop every language model runs: predict, choose, append, repeat.

Promises the tokens of Hugging Face's `generate(do_sample=False)`. Does not know how logits are computed: that
is the caller's `forward`. `FullForward` computes the whole sequence for each token, and Part 3 has one with a
cache. By default the likeliest token is chosen; Part 5 hands in another `choose`. Part 2.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.dense import causal
from engine.decoding.bad_words import bad_words_of
from engine.decoding.outputs import CompletionOutput, FinishReason, RequestOutput, RequestStats
from engine.decoding.params import SamplingParams
from engine.decoding.prompts import Prompt, prompt_token_ids
from engine.decoding.refusals import refuse_unknown_tokens, refuse_unsupported
from engine.decoding.stopping import GrowingOutput
from engine.models.config import ModelConfig
from engine.models.language_model import LanguageModel
from engine.text.tokenizer import Tokenizer

Forward = Callable[[Sequence[int]], Tensor]  # all token ids so far -> logits[V] of the next token
Choose = Callable[[Tensor], int]  # logits[V] -> token id

SUPPORTS: frozenset[str] = frozenset()  # no field of SamplingParams that a later part adds


@dataclass(frozen=True)
class DecodeStep:
    """One iteration of the loop."""

    token_id: int
    text: str  # the text that has become safe to show with this token; may be ""
    logits: Tensor  # [V]: the logits from which the token was chosen
    time: float  # seconds, of time.perf_counter()
    output: GrowingOutput  # the whole output; the same object in all steps, which goes on to grow

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the output has ended, or None if another token follows."""
        return self.output.finish_reason


@dataclass(frozen=True)
class Candidate:
    """One of the likeliest next tokens."""

    token_id: int
    text: str
    probability: float


class FullForward:
    """The `Forward` that runs the whole sequence through the model for each token.

    Each call takes longer than the call before, because the sequence grows.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.device = next(model.parameters()).device

    @torch.inference_mode()
    def __call__(self, token_ids: Sequence[int]) -> Tensor:
        """All token ids so far -> logits[V] of the next one."""
        tokens = torch.tensor(token_ids, device=self.device)  # [T]
        positions = torch.arange(len(token_ids), device=self.device)  # [T]
        hidden = self.model(tokens, positions, causal)  # [T, D]
        return self.model.logits(hidden[-1:])[0]  # [V]: only the token after the last one is unknown


def argmax(logits: Tensor) -> int:
    """The id of the largest of logits[V]; of equal logits, the lowest id."""
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
    """Generate token by token, and yield a `DecodeStep` after each token. The last step has a finish reason.

    `prompt` is text or token ids. `supports` names the fields of `params` that `forward` and `choose`
    implement. Raises ParameterError, before the first step, for a field or a prompt that is not accepted.
    """
    params = params.clone() if params else SamplingParams()
    refuse_unsupported(params, supports)
    refuse_unknown_tokens(params, config.vocab_size)
    token_ids = prompt_token_ids(prompt, tokenizer, config, truncate=params.truncate_prompt_tokens)
    output = GrowingOutput(
        tokenizer,
        params,
        prompt_length=len(token_ids),
        max_positions=config.max_positions,
        eos_token_ids=config.eos_token_ids,
        bad_words=bad_words_of(params, tokenizer, config.vocab_size),
    )
    return _decode(forward, token_ids, output, choose)


def _decode(
    forward: Forward, token_ids: list[int], output: GrowingOutput, choose: Choose
) -> Iterator[DecodeStep]:
    """Yield a DecodeStep for each token, until `output` has a finish reason. `forward` is not called after
    the last token.

    `token_ids` is the whole sequence. Each new id is appended to this list, which `forward` reads next, and
    to `output`. `output.visible` is the text that may be shown, and a DecodeStep has the text that its token
    added to `output.visible`. Tokens in `output.banned_token_ids` get the logit -inf in a copy of the logits,
    because `forward` may use its own tensor again. A DecodeStep has the logits with the bans, from which its
    token was chosen.
    """
    num_shown = 0
    while output.finish_reason is None:
        # 1. What could come next?
        logits = forward(token_ids)  # [V]
        if output.banned_token_ids:
            banned = torch.tensor(output.banned_token_ids, device=logits.device)
            logits = logits.index_fill(0, banned, -torch.inf)
        # 2. Choose a token, and append it to the sequence.
        token_id = choose(logits)
        token_ids.append(token_id)
        # 3. Is this token the last one? Which text is safe to show?
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
    """Run `decode_steps` to its end, and return the whole output with the time of each token.

    Raises ParameterError as `decode_steps` does.
    """
    stats = RequestStats(arrival=time.perf_counter())
    params = params.clone() if params else SamplingParams()
    token_ids = prompt_token_ids(prompt, tokenizer, config, truncate=params.truncate_prompt_tokens)
    for step in decode_steps(forward, tokenizer, config, token_ids, params):
        stats.token_times.append(step.time)
    output = step.output  # of the last step
    completion = CompletionOutput(
        index=0,
        text=output.text,
        token_ids=output.token_ids,
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
    )
    text = prompt if isinstance(prompt, str) else None
    return RequestOutput(request_id, text, token_ids, [completion], finished=True, stats=stats)


def top_candidates(logits: Tensor, tokenizer: Tokenizer, k: int = 5) -> list[Candidate]:
    """The k likeliest next tokens of logits[V], the likeliest first. An unknown id has the text ""."""
    probabilities, token_ids = torch.softmax(logits.float(), dim=-1).topk(k)
    candidates = []
    for token_id, probability in zip(token_ids.tolist(), probabilities.tolist(), strict=True):
        text = tokenizer.decode([token_id]) if token_id in tokenizer else ""
        candidates.append(Candidate(token_id, text, probability))
    return candidates
