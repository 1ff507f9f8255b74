"""What a row's probabilities ought to be: Hugging Face's own processors, one row at a time."""

import random
from collections import Counter
from dataclasses import fields

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.decoding.params import SamplingParams
from engine.decoding.sampling_state import SamplingState, allowed_mask


class OpenAIPenalties:
    """Frequency and presence penalties, which Hugging Face does not have, as OpenAI's reference states them:
    mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence, c counting the output alone.
    """

    def __init__(self, frequency: float, presence: float, output_ids: list[int]) -> None:
        self.frequency, self.presence, self.counts = frequency, presence, Counter(output_ids)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for token_id, count in self.counts.items():
            scores[0, token_id] -= count * self.frequency + float(count > 0) * self.presence
        return scores


def probabilities(logits: Tensor, row: SamplingState) -> Tensor:
    """logits[V] -> probs[V], in the order of Hugging Face's `generate`."""
    p, ids = row.params, [*row.prompt_ids, *row.output_ids]
    chain = LogitsProcessorList()
    if p.logit_bias:
        chain.append(SequenceBiasLogitsProcessor({(token,): float(b) for token, b in p.logit_bias.items()}))
    if p.repetition_penalty != 1:
        chain.append(RepetitionPenaltyLogitsProcessor(float(p.repetition_penalty)))
    chain.append(OpenAIPenalties(p.frequency_penalty, p.presence_penalty, list(row.output_ids)))
    if p.min_tokens and row.stop_ids:
        chain.append(MinNewTokensLengthLogitsProcessor(len(row.prompt_ids), p.min_tokens, list(row.stop_ids)))
    if p.allowed_token_ids is not None:
        others = set(range(len(logits))) - set(p.allowed_token_ids)
        chain.append(SuppressTokensLogitsProcessor(sorted(others)))
    if p.temperature not in (None, 1):
        chain.append(TemperatureLogitsWarper(float(p.temperature)))
    if p.top_k > 0:
        chain.append(TopKLogitsWarper(p.top_k))
    if p.top_p < 1:
        chain.append(TopPLogitsWarper(p.top_p))
    if p.min_p > 0:
        chain.append(MinPLogitsWarper(p.min_p))
    return chain(torch.tensor([ids]), logits[None].clone().float()).softmax(-1)[0]


def knobs(row: SamplingState) -> str:
    """The parameters of a row that are not at their defaults, and no others."""
    defaults = SamplingParams()
    turned = {
        f.name: value
        for f in fields(row.params)
        if (value := getattr(row.params, f.name)) != getattr(defaults, f.name)
    }
    turned.pop("seed", None)
    return ", ".join(f"{name}={value}" for name, value in turned.items()) or "no knob set"


def random_logits(rows: int, vocab_size: int, seed: int, scale: float = 4.0) -> Tensor:
    """[rows, vocab_size], no two equal in a row."""
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def random_row(rng: random.Random, vocab_size: int) -> SamplingState:
    """Any mixture of parameters and of tokens so far."""

    def perhaps(value, otherwise):
        return value if rng.random() < 0.5 else otherwise

    tokens = range(vocab_size)
    params = SamplingParams(
        temperature=perhaps(rng.choice([0.05, 0.3, 0.7, 1.0, 1.3, 2.5]), None),
        top_k=perhaps(rng.choice([1, 2, 5, 40, vocab_size, vocab_size + 9]), rng.choice([0, -1])),
        top_p=perhaps(rng.choice([0.01, 0.1, 0.5, 0.9, 0.95, 0.999]), 1.0),
        min_p=perhaps(rng.choice([0.001, 0.02, 0.1, 0.5, 1.0]), 0.0),
        repetition_penalty=perhaps(rng.choice([0.5, 0.9, 1.1, 1.5, 3.0]), 1.0),
        frequency_penalty=perhaps(rng.uniform(-2, 2), 0.0),
        presence_penalty=perhaps(rng.uniform(-2, 2), 0.0),
        logit_bias=perhaps({rng.choice(tokens): rng.uniform(-100, 100) for _ in range(3)}, None),
        min_tokens=perhaps(rng.choice([1, 4, 9]), 0),
        seed=rng.randrange(-(2**63), 2**63),
        allowed_token_ids=perhaps(None, rng.sample(tokens, rng.randint(vocab_size // 2, vocab_size))),
    )
    prompt = rng.choices(tokens, k=rng.randint(1, 12))
    output = rng.choices(range(min(8, vocab_size)), k=rng.randint(0, 12))  # with repetitions
    mask = allowed_mask(params.allowed_token_ids)
    return SamplingState(params, prompt, output, params.seed, rng.sample(tokens, 2), mask=mask)
