"""From logits to a token: temperature, top-k, top-p, min-p, penalties, bias, seeds, all rows unlike.

Promises the probabilities of Hugging Face's logits processors, in their order, and a draw that depends on a
row's own probabilities, seed and position alone: never on its batch mates, nor on preemption. Probabilities
that differ by rounding nearly always give the same token. Every decision is made from host-side numbers, so a
GPU is never waited for. Does not know where rows come from. Part 5.
Sources: top-p: Holtzman et al. 2019, https://arxiv.org/abs/1904.09751; min-p: Nguyen et al. 2024,
https://arxiv.org/abs/2407.01082; frequency and presence penalties: OpenAI's API reference; the race:
Efraimidis and Spirakis 2006, https://doi.org/10.1016/j.ipl.2005.11.003.
"""

import secrets
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from engine.decoding.greedy import Choose
from engine.decoding.params import SamplingParams
from engine.decoding.penalties import Changes

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
NO_TOKEN = -1  # where nothing can be chosen: the model's numbers are broken
COLDEST = 1e-6  # a smaller temperature would overflow fp32, and is greedy long before
INT32_OFFSET = 2**31  # added to a signed whole number of 32 bits, makes it 0 or more
CACHE_NUMBERS = 2**15  # numbers that a processor core's cache holds while they are computed


class Limits(NamedTuple):
    """The fields of SamplingParams that a row's choice depends on beside its temperature and seed."""

    top_k: int
    top_p: float
    min_p: float
    min_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """All that choosing a token from a row of logits needs, in numbers, for a step's record (Part 6)."""

    params: Limits
    temperature: float
    seed: int
    names_seed: bool  # whether tokens are drawn by a seed of the request's own choice (Part 16)
    is_adjusted: bool  # whether `adjust` may have anything to do
    stop_ids: tuple[int, ...] = ()  # not to be chosen before `min_tokens`
    tokens: np.ndarray | None = None  # [C]: what bias and penalties touch
    factors: np.ndarray | None = None  # [C, 3]: as `SamplingState.changes` has it
    mask: np.ndarray | None = None  # [V / 32]: bit v says whether token v may be chosen at all (Part B)

    def changes(self) -> tuple[np.ndarray, np.ndarray]:
        """tokens[C], factors[C, 3] of a row that is adjusted."""
        assert self.tokens is not None
        assert self.factors is not None
        return self.tokens, self.factors


class Row(Protocol):
    """What the functions below ask of a row: a request's living `SamplingState`, or a `Draw` of it."""

    @property
    def params(self) -> SamplingParams | Limits: ...
    @property
    def temperature(self) -> float: ...
    @property
    def seed(self) -> int: ...
    @property
    def stop_ids(self) -> Sequence[int]: ...
    @property
    def is_adjusted(self) -> bool: ...
    def changes(self) -> tuple[np.ndarray, np.ndarray]: ...


@dataclass(slots=True)
class SamplingState:
    """What a row of logits needs to know about its request, as long as the request lives."""

    params: SamplingParams
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]  # the growing list itself, not a copy
    seed: int
    stop_ids: Sequence[int] = ()  # not to be chosen before `min_tokens`
    guesses: Sequence[int] = ()  # proposed tokens behind the output, counted as if they were in it (Part 16)
    temperature: float = field(init=False)
    is_adjusted: bool = field(init=False)  # whether `adjust` may have anything to do
    _changes: Changes = field(init=False)
    _draw: Draw = field(init=False)  # of a row that is not adjusted: always the same

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
        self._changes = Changes(p, self.prompt_ids)
        self._draw = Draw(
            Limits(p.top_k, p.top_p, p.min_p, p.min_tokens),
            self.temperature,
            self.seed,
            p.seed is not None,
            self.is_adjusted,
        )

    def draw(self) -> Draw:
        """A record of the state as it is now, which later tokens do not change."""
        if not self.is_adjusted:
            return self._draw
        tokens, factors = self.changes()
        return replace(
            self._draw, stop_ids=tuple(self.stop_ids), tokens=tokens.copy(), factors=factors.copy()
        )

    def changes(self) -> tuple[np.ndarray, np.ndarray]:
        """tokens[C], factors[C, 3]: the tokens that bias and penalties touch after the output so far, and for
        each (bias, repetition, subtract). What does nothing is 0, 1 and 0.
        """
        return self._changes.for_output(self.output_ids, self.guesses)

    def behind(self, guesses: Sequence[int]) -> "SamplingState":
        """The state as if these tokens were in the output, too. It shares the counts of the output with this
        one.
        """
        state = copy(self)
        state.guesses = guesses
        return state


def new_seed(params: SamplingParams) -> int:
    """The request's seed, or a random one for a request that names none."""
    return secrets.randbits(63) if params.seed is None else params.seed


def sample(logits: Tensor, rows: Sequence[Row], positions: Sequence[int] | None = None) -> Tensor:
    """logits[R, V] -> token ids[R], each row by its own parameters; NO_TOKEN where the likeliest logit is no
    finite number.

    `positions[R]`: which of its request's output tokens each row is to give, counted from 0. Default: the one
    behind those the row has.
    """
    if positions is None:
        positions = next_positions(rows)
    if not any(row.temperature for row in rows):
        return _likeliest(adjust(logits, rows, positions))
    probs = distribution(logits, rows, positions)
    token_ids = draw(probs, [row.seed for row in rows], positions)
    return torch.where(logits.amax(-1).isfinite(), token_ids, NO_TOKEN)


def next_positions(rows: Sequence[Row]) -> list[int]:
    """Which output token comes next in each row. A `Draw` does not know: its record says so beside it."""
    return [len(row.output_ids) for row in rows if isinstance(row, SamplingState)]


def _likeliest(logits: Tensor) -> Tensor:
    """logits[R, V] -> token ids[R]: on a CPU NumPy finds them several times faster than PyTorch."""
    if logits.device.type != "cpu" or logits.dtype is torch.bfloat16:  # which NumPy does not know
        best, token_ids = logits.max(-1)
        return torch.where(best.isfinite(), token_ids, NO_TOKEN)
    numbers = logits.detach().numpy()
    chosen = numbers.argmax(-1)
    best = numbers[np.arange(len(chosen)), chosen]
    chosen[~np.isfinite(best)] = NO_TOKEN
    return torch.from_numpy(chosen)


def distribution(logits: Tensor, rows: Sequence[Row], positions: Sequence[int] | None = None) -> Tensor:
    """logits[R, V] -> probs[R, V] in fp32, what each next token is drawn from; one-hot for temperature 0.

    In order: bias and penalties, temperature, top-k, top-p, min-p, each over what the one before left. A
    fence is a value: all tokens that equal it stay. The likeliest always stays. What no row asks for is not
    computed.
    """

    def column(values: list[float]) -> Tensor:
        """values[R] -> [R, 1]"""
        return torch.tensor(values, dtype=torch.float32).to(logits.device, non_blocking=True)[:, None]

    params = [row.params for row in rows]
    logits = adjust(logits.float(), rows, positions)  # [R, V]
    likeliest = logits.argmax(-1, keepdim=True)  # [R, 1]
    logits = logits / column([max(row.temperature, COLDEST) if row.temperature else 1.0 for row in rows])

    if any(p.top_k > 0 or p.top_p < 1 for p in params):
        ascending = _sorted(logits)  # [R, V]
        V = logits.shape[-1]
        # 1. top-k: below the k-th largest value nothing stays.
        kth = column([V - min(p.top_k, V) if p.top_k > 0 else 0 for p in params]).long()  # [R, 1]: its index
        ascending = ascending.masked_fill(ascending < ascending.gather(-1, kth), -torch.inf)
        # 2. top-p: the smallest set of the likeliest tokens whose probability reaches p; the very likeliest
        #    stays, and so do equals of the least likely one.
        tail = column([1 - p.top_p if p.top_p < 1 else -1.0 for p in params])  # [R, 1]: -1: all stay
        is_behind = ascending.softmax(-1).cumsum(-1) <= tail  # [R, V]
        num_behind = is_behind[:, :-1].sum(-1, keepdim=True)  # [R, 1]: index of the least likely that stays
        fence = ascending.gather(-1, torch.maximum(num_behind, kth))  # [R, 1]
        logits = logits.masked_fill(logits < fence, -torch.inf)
    probs = logits.softmax(-1)
    if any(p.min_p > 0 for p in params):
        # 3. min-p: at least this share of the likeliest token's probability.
        fence = probs.amax(-1, keepdim=True) * column([p.min_p for p in params])  # [R, 1]
        probs = logits.masked_fill(probs < fence, -torch.inf).softmax(-1)
    if any(row.temperature == 0 for row in rows):
        greedy = column([row.temperature == 0 for row in rows]).bool()  # [R, 1]
        probs = torch.where(greedy, torch.zeros_like(probs).scatter_(-1, likeliest, 1.0), probs)
    return probs


def _sorted(logits: Tensor) -> Tensor:
    """logits[R, V] in ascending order, the values alone: on a CPU NumPy sorts them several times faster."""
    if logits.device.type == "cpu":
        return torch.from_numpy(np.sort(logits.detach().numpy(), axis=-1))
    return logits.sort(dim=-1).values


def adjust(logits: Tensor, rows: Sequence[Row], positions: Sequence[int] | None = None) -> Tensor:
    """logits[R, V] in fp32, with each row's bias, penalties and bans applied to the few tokens they are for.

    A penalised token's logit x becomes, after its bias: x / r if x > 0 else x · r (repetition, prompt and
    output), then x − frequency · count − presence (output only). A row's stop tokens are banned, whatever
    else is said of them, as long as its output has fewer than `min_tokens`.
    """
    if not any(row.is_adjusted for row in rows):
        return logits
    logits = logits.float()  # as beside a sampled row: bf16 would depend on who else is in the batch
    adjusted = [i for i, row in enumerate(rows) if row.is_adjusted]
    tokens, factors = zip(*[rows[i].changes() for i in adjusted])  # of each such row
    row_indices = np.repeat(adjusted, [len(row_tokens) for row_tokens in tokens])  # [C], of all rows
    if len(row_indices):
        index = _to(logits.device, row_indices), _to(logits.device, np.concatenate(tokens))  # each [C]
        bias, repetition, subtract = _to(logits.device, np.concatenate(factors)).unbind(1)  # each [C]
        x = logits[index] + bias  # [C]
        x = torch.where(x > 0, x / repetition, x * repetition) - subtract
        logits = logits.index_put(index, x)
    if positions is None:
        positions = next_positions(rows)
    banned: list[tuple[int, int]] = []  # (row, token)
    for i, (row, position) in enumerate(zip(rows, positions, strict=True)):
        if position < row.params.min_tokens:
            banned += [(i, token) for token in row.stop_ids]
    if banned:
        banned_index = _to(logits.device, np.array(banned)).unbind(1)  # rows, tokens
        logits = logits.index_put(banned_index, logits.new_full((), -torch.inf))
    return logits


def _to(device: torch.device, numbers: np.ndarray) -> Tensor:
    """Host numbers on the device. The host does not wait for the copy."""
    return torch.from_numpy(numbers).to(device, non_blocking=True)


def draw(probs: Tensor, seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
    """probs[R, V] -> token ids[R]: row i's token is a function of its probabilities, seed and position only.

    A race: token v arrives after noise[v] / probs[v], and the first to arrive is drawn. As the noise is
    exponential, each token is the first as often as its share of the row's sum says, and one of probability 0
    never arrives. An error in a probability delays that token by as much, and seldom changes who is first.
    """
    noise = exponential_noise(seeds, positions, probs.shape[-1], probs.device)  # [R, V]
    speed = probs / noise
    if speed.device.type == "cpu":  # NumPy finds the largest several times faster
        return torch.from_numpy(speed.numpy().argmax(-1))
    return speed.argmax(-1)


def exponential_noise(seeds: Sequence[int], positions: Sequence[int], V: int, device: torch.device) -> Tensor:
    """[R, V] in fp32, all above 0: exponential random numbers of mean 1. Each is a function of its row's seed
    and position and of its token id: nothing is used up, and all devices give the same up to rounding.
    """
    keys = np.array([_key(seed, i) for seed, i in zip(seeds, positions, strict=True)], dtype=np.uint64)  # [R]
    halves = keys.view(np.int32).reshape(-1, 2)  # [R, 2]
    if device.type != "cpu":
        first, second = _to(device, halves).T[:, :, None]  # [R, 1] each
        hashes = _hash32(_hashes_of_ids(V, device), first, second).double()  # [R, V]
        return -((hashes + (INT32_OFFSET + 0.5)) / 2**32).log().float()
    noise = np.empty((len(keys), V), dtype=np.float32)
    id_hashes = _hashes_of_ids(V, device).numpy()  # [V]
    count = max(1, CACHE_NUMBERS // V)  # rows at a time
    for start in range(0, len(keys), count):
        rows = slice(start, start + count)
        hashes = _hash32(id_hashes, halves[rows, :1], halves[rows, 1:])  # [count, V]
        numbers = hashes + (INT32_OFFSET + 0.5)  # [count, V] in double
        numbers /= 2**32  # between 0 and 1, and never either
        np.negative(np.log(numbers, out=numbers), out=noise[rows], casting="same_kind")
    return torch.from_numpy(noise)


@lru_cache(maxsize=8)
def _hashes_of_ids(V: int, device: torch.device) -> Tensor:
    """[V] in int32: neighbouring token ids have nothing in common any more."""
    return _hash32(torch.arange(V, dtype=torch.int32, device=device), 0, 0)


def _hash32(x: Any, first: Any, second: Any) -> Any:
    """Two multiplications of lowbias32 (Wellons 2018, https://nullprogram.com/blog/2018/07/31/), with half of
    a key in front of each. Of arrays or tensors in int32, so that a CPU and a GPU count alike; a shift's mask
    makes the shift unsigned.
    """
    x = x ^ first
    x *= 0x21F0AAAD
    x ^= x >> 15 & 0x1FFFF
    x += second
    x *= 0x735A2D97
    x ^= x >> 15 & 0x1FFFF
    return x


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) for the `position`-th token of `seed`; `draw` uses others."""
    return (_key(seed, position) >> 11) / (1 << 53)


def _key(seed: int, position: int) -> int:
    """64 bits for the `position`-th token of `seed`: SplitMix64 (Steele et al. 2014), used as a hash."""
    mask = (1 << 64) - 1
    return _mix((_mix(seed & mask) + (position + 1) * 0x9E3779B97F4A7C15) & mask)


def _mix(z: int) -> int:
    """SplitMix64's last step, which mixes the 64 bits of z."""
    mask = (1 << 64) - 1
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def sampler(params: SamplingParams, prompt_ids: Sequence[int], index: int = 0) -> Choose:
    """`choose` for Part 2's loop: the `index`-th of a request's n samples, seeded with seed + index."""
    output_ids: list[int] = []
    row = SamplingState(params, prompt_ids, output_ids, new_seed(params) + index)

    def choose(logits: Tensor) -> int:
        token_id = int(sample(logits[None], [row])[0])
        output_ids.append(token_id)
        return token_id

    return choose
