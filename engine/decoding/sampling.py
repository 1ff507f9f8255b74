"""From logits to a token: temperature, top-k, top-p, min-p, penalties, bias, seeds, all rows unlike.

Promises the probabilities of Hugging Face's logits processors, in their order, and a draw that depends on a
row's own seed and position alone: never on its batch mates, nor on preemption. Every decision is made from
host-side numbers, so a GPU is never waited for. Does not know where rows come from. Part 5.
Sources: top-p: Holtzman et al. 2019, https://arxiv.org/abs/1904.09751; min-p: Nguyen et al. 2024,
https://arxiv.org/abs/2407.01082; frequency and presence penalties: OpenAI's API reference.
"""

import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from engine.decoding.greedy import Choose
from engine.decoding.params import SamplingParams

SUPPORTS = frozenset(
    [
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "logit_bias",
        "seed",
        "n",
    ]
)
COLDEST = 1e-6  # a smaller temperature would overflow fp32, and is greedy long before
UNIFORM_BITS = 48  # fewer than a double's 53, so that u · total < total in double precision


@dataclass(slots=True)
class Row:
    """What a row of logits needs to know about its request; one object serves the request's whole life."""

    params: SamplingParams
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]  # the growing list itself, not a copy
    seed: int
    stop_ids: Sequence[int] = ()  # not to be chosen before `min_tokens`
    temperature: float = field(init=False)
    is_adjusted: bool = field(init=False)  # whether `adjust` may have anything to do

    def __post_init__(self) -> None:
        p = self.params
        self.temperature = 1.0 if p.temperature is None else p.temperature
        self.is_adjusted = bool(
            p.logit_bias
            or p.repetition_penalty != 1
            or p.frequency_penalty
            or p.presence_penalty
            or p.min_tokens
        )


def new_seed(params: SamplingParams) -> int:
    """The request's seed, or a random one for a request that names none."""
    return secrets.randbits(63) if params.seed is None else params.seed


def sample(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """logits[R, V] -> token ids[R], each row by its own parameters."""
    if all(row.temperature == 0 for row in rows):
        return adjust(logits, rows).argmax(-1)
    return draw(distribution(logits, rows), [row.seed for row in rows], [len(row.output_ids) for row in rows])


def distribution(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """logits[R, V] -> probs[R, V] in fp32, what each next token is drawn from; one-hot for temperature 0.

    In order: bias and penalties, temperature, top-k, top-p, min-p, each over what the one before left. A
    fence is a value: tokens equal to the border's stay. The likeliest always stays. What no row asks for
    costs nothing.
    """

    def column(values: list[float]) -> Tensor:
        """values[R] -> [R, 1]"""
        return torch.tensor(values, dtype=torch.float32).to(logits.device, non_blocking=True)[:, None]

    params = [row.params for row in rows]
    logits = adjust(logits.float(), rows)  # [R, V]
    likeliest = logits.argmax(-1, keepdim=True)  # [R, 1]
    logits = logits / column([max(row.temperature, COLDEST) if row.temperature else 1.0 for row in rows])

    if any(p.top_k > 0 or p.top_p < 1 for p in params):
        ascending = _sorted(logits)  # [R, V]
        V = logits.shape[-1]
        # 1. top-k: below the k-th largest value nothing stays.
        kth = column([V - min(p.top_k, V) if p.top_k > 0 else 0 for p in params]).long()
        ascending = ascending.masked_fill(ascending < ascending.gather(-1, kth), -torch.inf)
        # 2. top-p: the smallest set of the likeliest tokens whose probability reaches p; the very likeliest
        #    stays, and so do equals of the least likely one.
        below = ascending.softmax(-1).cumsum(-1) <= column(
            [1 - p.top_p if p.top_p < 1 else -1.0 for p in params]
        )
        first = below[:, :-1].sum(-1, keepdim=True)  # [R, 1]: place of the least likely token that stays
        least = ascending.gather(-1, torch.maximum(first, kth))
        logits = logits.masked_fill(logits < least, -torch.inf)
    probs = logits.softmax(-1)
    if any(p.min_p > 0 for p in params):
        # 3. min-p: at least this share of the likeliest token's probability.
        least = probs.amax(-1, keepdim=True) * column([p.min_p for p in params])
        probs = logits.masked_fill(probs < least, -torch.inf).softmax(-1)
    if any(row.temperature == 0 for row in rows):
        greedy = column([row.temperature == 0 for row in rows]).bool()
        probs = torch.where(greedy, torch.zeros_like(probs).scatter_(-1, likeliest, 1.0), probs)
    return probs


def _sorted(logits: Tensor) -> Tensor:
    """logits[R, V] in ascending order, the values alone: on a CPU NumPy sorts them several times faster."""
    if logits.device.type == "cpu":
        return torch.from_numpy(np.sort(logits.detach().numpy(), axis=-1))
    return logits.sort(dim=-1).values


def adjust(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """logits[R, V] with each row's bias, penalties and bans applied: few tokens per row, so only those are
    touched.

    A penalised token's logit x becomes, after its bias: x / r if x > 0 else x · r (repetition, prompt and
    output), then x − frequency · count − presence (output only).
    """
    places: list[tuple[int, int]] = []  # (row, token)
    changes: list[tuple[float, float, float]] = []  # (bias, repetition, subtract)
    for index, row in enumerate(rows):
        if row.is_adjusted:
            for token, change in _changes(row).items():
                places.append((index, token))
                changes.append(change)
    if not places:
        return logits
    row_of, token_of = torch.tensor(places).to(logits.device, non_blocking=True).unbind(1)  # each [C]
    bias, repetition, subtract = (
        torch.tensor(changes, dtype=logits.dtype).to(logits.device, non_blocking=True).unbind(1)
    )
    x = logits[row_of, token_of] + bias  # [C]
    x = torch.where(x > 0, x / repetition, x * repetition) - subtract
    return logits.index_put((row_of, token_of), x)


def _changes(row: Row) -> dict[int, tuple[float, float, float]]:
    """token -> (bias, repetition, subtract), for the tokens this row's parameters touch."""
    p = row.params
    bias = p.logit_bias or {}
    counts = Counter(row.output_ids) if p.frequency_penalty or p.presence_penalty else {}
    seen = {*row.prompt_ids, *row.output_ids} if p.repetition_penalty != 1 else set()
    banned = row.stop_ids if len(row.output_ids) < p.min_tokens else ()
    changes = {
        token: (
            bias.get(token, 0.0),
            p.repetition_penalty if token in seen else 1.0,
            p.frequency_penalty * counts[token] + p.presence_penalty if token in counts else 0.0,
        )
        for token in {*bias, *counts, *seen}
    }
    return changes | dict.fromkeys(banned, (-torch.inf, 1.0, 0.0))


def draw(probs: Tensor, seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
    """probs[R, V] -> token ids[R]: row i's token is a function of its probabilities, seed and position only.

    The uniform number comes from a counter, not from a generator's state. The token is the first whose
    cumulative probability lies beyond that share of the row's sum, in double precision: one of probability 0
    never is.
    """
    uniforms = [uniform(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    u = torch.tensor(uniforms, dtype=torch.float64).to(probs.device, non_blocking=True)[:, None]  # [R, 1]
    cumulative = probs.double().cumsum(-1)  # [R, V]
    beyond = torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True)[:, 0]  # [R]: first beyond u
    return beyond.clamp(max=probs.shape[-1] - 1)  # a row of NaN must not name a token that does not exist


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) for the `position`-th draw of `seed`: SplitMix64 (Steele et al. 2014), used as a
    hash.
    """
    mask = (1 << 64) - 1
    z = (_mix(seed & mask) + (position + 1) * 0x9E3779B97F4A7C15) & mask
    return (_mix(z) >> (64 - UNIFORM_BITS)) / (1 << UNIFORM_BITS)


def _mix(z: int) -> int:
    mask = (1 << 64) - 1
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def sampler(params: SamplingParams, prompt_ids: Sequence[int], index: int = 0) -> Choose:
    """`choose` for Part 2's loop: the `index`-th of a request's n samples, seeded with seed + index."""
    output_ids: list[int] = []
    row = Row(params, prompt_ids, output_ids, new_seed(params) + index)

    def choose(logits: Tensor) -> int:
        token_id = int(sample(logits[None], [row])[0])
        output_ids.append(token_id)
        return token_id

    return choose
