"""From logits to tokens: temperature, top-k, top-p, min-p, penalties, bias and seeds, different for each row.

Promises the probabilities of Hugging Face's logits processors, applied in the same order, where no two
probabilities of a row are equal; OpenAI's two penalties are as OpenAI describes them. A row's token
depends only on the row's own probabilities, seed and position, and not on other rows of the batch or on
preemption. Probabilities that differ by rounding nearly always give the same token. All branches depend on
numbers of the host, so the host reads nothing back from a GPU. Does not know where rows come from. Part 5.
Sources: top-p: Holtzman et al. 2019, https://arxiv.org/abs/1904.09751; min-p: Nguyen et al. 2024,
https://arxiv.org/abs/2407.01082; frequency and presence penalties: OpenAI's API reference; the race:
Efraimidis and Spirakis 2006, https://doi.org/10.1016/j.ipl.2005.11.003.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.decoding.greedy import Choose
from engine.decoding.noise import exponential_noise
from engine.decoding.params import SamplingParams
from engine.decoding.sampling_state import Row, SamplingState, allowed_by, allowed_mask, seed_of

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
        "allowed_token_ids",
        "seed",
        "n",
    ]
)
NO_TOKEN = -1  # the result for a row in which no token can be chosen
# The lowest temperature above 0. Dividing by far less would overflow fp32, and a lower temperature could only
# tell logits apart that differ by about 1e-6.
COLDEST = 1e-6


def sample(logits: Tensor, rows: Sequence[Row], positions: Sequence[int] | None = None) -> Tensor:
    """Choose a token for each row: logits[R, V] -> token ids[R].

    `rows` [R] has the parameters of each row. positions[R] is the index of each row's token in its request's
    output, from 0. By default, it is the length of the output so far; a `Draw` does not know it, and raises
    TypeError. A row that may choose no token, or whose largest adjusted logit (`adjust`) is not finite, gives
    NO_TOKEN.
    """
    if positions is None:
        positions = next_positions(rows)
    if not any([row.temperature for row in rows]):
        return _likeliest(adjust(logits, rows, positions))
    probs = distribution(logits, rows, positions)
    token_ids = draw(probs, [row.seed for row in rows], positions)
    return torch.where(probs[:, 0].isfinite(), token_ids, NO_TOKEN)  # a row is finite, or NaN as a whole


def next_positions(rows: Sequence[Row]) -> list[int]:
    """[R]: the index of each row's next output token. Raises TypeError for a `Draw`, which has no output."""
    positions = []
    for row in rows:
        if not isinstance(row, SamplingState):
            raise TypeError(f"a {type(row).__name__} has no output: the positions of its tokens are needed")
        positions.append(len(row.output_ids))
    return positions


def _likeliest(logits: Tensor) -> Tensor:
    """logits[R, V] -> token ids[R]: the token of the largest logit, or NO_TOKEN if that is not finite.

    On a CPU, NumPy finds the largest logit several times faster than PyTorch.
    """
    if logits.device.type != "cpu" or logits.dtype is torch.bfloat16:  # NumPy has no bfloat16
        best, token_ids = logits.max(-1)
        return torch.where(best.isfinite(), token_ids, NO_TOKEN)
    numbers = logits.detach().numpy()
    chosen = numbers.argmax(-1)
    best = numbers[np.arange(len(chosen)), chosen]
    chosen[~np.isfinite(best)] = NO_TOKEN
    return torch.from_numpy(chosen)


def distribution(logits: Tensor, rows: Sequence[Row], positions: Sequence[int] | None = None) -> Tensor:
    """logits[R, V] -> probs[R, V] in fp32: the probabilities from which each row's token is drawn.

    The steps are, in order: bias and penalties, temperature, top-k, top-p, min-p. Each step works on the
    tokens that the step before has kept. Top-k, top-p and min-p keep every token that is as likely as the
    least likely token they keep, and always keep the likeliest token. Temperature 0 gives probability 1 to
    the likeliest token, of equals to the first. A step that no row asks for is not computed. A row that may
    choose no token, or whose largest adjusted logit is not finite, is NaN.
    """

    def column(values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
        """values[R] -> [R, 1]"""
        return torch.tensor(values, dtype=dtype).to(logits.device, non_blocking=True)[:, None]

    params = [row.params for row in rows]
    logits = adjust(logits.float(), rows, positions)  # [R, V]
    likeliest = logits.argmax(-1, keepdim=True)  # [R, 1]
    # Greedy rows are replaced at the end, so any temperature does for them.
    temperatures = [max(row.temperature, COLDEST) if row.temperature else 1.0 for row in rows]
    logits = logits / column(temperatures)

    # Top-k and top-p together give each row `min_logit`: tokens with a smaller logit are dropped.
    if any(p.top_k > 0 or p.top_p < 1 for p in params):
        ascending = _sorted(logits)  # [R, V]
        V = logits.shape[-1]
        # 1. top-k: drop the values below the k-th largest value, which is at `kth_index`.
        indices = [V - min(p.top_k, V) if p.top_k > 0 else 0 for p in params]
        kth_index = column(indices, torch.long)  # [R, 1]
        ascending = ascending.masked_fill(ascending < ascending.gather(-1, kth_index), -torch.inf)
        # 2. top-p: keep the smallest set of the likeliest tokens whose probability reaches p, and tokens that
        #    are as likely as the least likely token of this set. So the least likely tokens are dropped, with
        #    a probability of at most 1 - p together. The likeliest token always stays.
        max_dropped = column([1 - p.top_p if p.top_p < 1 else -1 for p in params])  # [R, 1]; -1: drop none
        is_dropped = ascending.softmax(-1).cumsum(-1) <= max_dropped  # [R, V]
        first_kept = is_dropped[:, :-1].sum(-1, keepdim=True)  # [R, 1]: index of the least likely kept token
        min_logit = ascending.gather(-1, torch.maximum(first_kept, kth_index))  # [R, 1]
        logits = logits.masked_fill(logits < min_logit, -torch.inf)
    probs = logits.softmax(-1)
    if any(p.min_p > 0 for p in params):
        # 3. min-p: keep tokens that have at least this share of the likeliest token's probability.
        min_prob = probs.amax(-1, keepdim=True) * column([p.min_p for p in params])  # [R, 1]
        probs = logits.masked_fill(probs < min_prob, -torch.inf).softmax(-1)
    if any(row.temperature == 0 for row in rows):
        # 4. Greedy rows: probability 1 for the likeliest token. A row that is NaN stays NaN.
        is_greedy = column([row.temperature == 0 for row in rows], torch.bool)  # [R, 1]
        greedy = is_greedy & probs[:, :1].isfinite()  # [R, 1]
        probs = torch.where(greedy, torch.zeros_like(probs).scatter_(-1, likeliest, 1.0), probs)
    return probs


def _sorted(logits: Tensor) -> Tensor:
    """The values of logits[R, V], each row in ascending order. On a CPU, NumPy sorts several times faster."""
    if logits.device.type == "cpu":
        return torch.from_numpy(np.sort(logits.detach().numpy(), axis=-1))
    return logits.sort(dim=-1).values


def adjust(logits: Tensor, rows: Sequence[Row], positions: Sequence[int] | None = None) -> Tensor:
    """Apply the bias, penalties and bans of each row to logits[R, V], which do not change. Returns logits
    [R, V] in fp32, or the given tensor if no row is adjusted.

    `row.changes()` names the tokens to change and their factors (bias, repetition, subtract), where subtract
    is frequency · count + presence. First the bias is added to a token's logit x. Then the repetition penalty
    r applies to tokens of the prompt and the output: x becomes x / r if x > 0, else x · r. Then the other
    penalties apply to tokens of the output: x becomes x − frequency · count − presence. Then tokens are
    banned, whatever their bias: they get the logit -inf. Banned are the row's `bad_ids`, its stop tokens
    while its output has fewer than `min_tokens` tokens, and, if it has a mask, all tokens that are not in
    `allowed_by(mask, V)` [V]. All other logits stay as they are.
    """
    if not any([row.is_adjusted for row in rows]):
        return logits
    # In fp32, as `distribution` passes them: else a greedy row's token would depend on whether another row of
    # the batch is sampled.
    logits = logits.float()
    adjusted = [i for i, row in enumerate(rows) if row.is_adjusted]
    # 1. Bias and penalties. C counts the changes of all rows together.
    changes = [rows[i].changes() for i in adjusted]
    tokens = [row_tokens for row_tokens, _ in changes]  # by adjusted row
    factors = [row_factors for _, row_factors in changes]
    row_indices = np.repeat(adjusted, [len(row_tokens) for row_tokens in tokens])  # [C]
    if len(row_indices):
        index = (_to(logits.device, row_indices), _to(logits.device, np.concatenate(tokens)))  # each [C]
        bias, repetition, subtract = _to(logits.device, np.concatenate(factors)).unbind(1)  # each [C]
        x = logits[index] + bias  # [C]
        x = torch.where(x > 0, x / repetition, x * repetition) - subtract
        logits = logits.index_put(index, x)
    # 2. Single tokens that are banned.
    if positions is None:
        positions = next_positions(rows)
    banned: list[tuple[int, int]] = []  # (row, token)
    for i, (row, position) in enumerate(zip(rows, positions, strict=True)):
        banned += [(i, token) for token in row.bad_ids]
        if position < row.params.min_tokens:
            banned += [(i, token) for token in row.stop_ids]
    if banned:
        banned_index = _to(logits.device, np.array(banned)).unbind(1)  # rows, tokens
        logits = logits.index_put(banned_index, logits.new_full((), -torch.inf))
    # 3. Masks.
    masks: dict[int, np.ndarray] = {}  # by row; M rows have a mask
    for i in adjusted:
        mask = rows[i].mask
        if mask is not None:
            masks[i] = mask
    if masks:
        V = logits.shape[-1]
        allowed = _to(logits.device, np.stack([allowed_by(mask, V) for mask in masks.values()]))  # [M, V]
        masked_rows = _to(logits.device, np.array(list(masks)))  # [M]
        masked_logits = logits[masked_rows].masked_fill(~allowed, -torch.inf)  # [M, V]
        logits = logits.index_put((masked_rows,), masked_logits)
    return logits


def _to(device: torch.device, numbers: np.ndarray) -> Tensor:
    """Copy numbers of the host to `device`. The memory is not pinned, so CUDA promises not to make the host
    wait only up to 64 KB; masks may be larger.
    """
    return torch.from_numpy(numbers).to(device, non_blocking=True)


def draw(probs: Tensor, seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
    """Draw a token for each row: probs[R, V] -> token ids[R]. The token of a row is a function of the row's
    probabilities, seed and position only.

    The draw is a race: token v arrives at time noise[v] / probs[v], and the first token to arrive is drawn.
    The noise is exponential, so each token wins with a chance of its share of the row's sum. A token of
    probability 0 never arrives. A rounding error in a probability changes one token's time by the same
    factor, and so rarely changes the winner.
    """
    noise = exponential_noise(seeds, positions, probs.shape[-1], probs.device)  # [R, V]
    speed = probs / noise  # [R, V]: 1 / the time of arrival
    if speed.device.type == "cpu":  # NumPy finds the largest number several times faster
        return torch.from_numpy(speed.numpy().argmax(-1))
    return speed.argmax(-1)


def sampler(params: SamplingParams, prompt_ids: Sequence[int], index: int = 0) -> Choose:
    """The `Choose` function for Part 2's loop that samples by `params`.

    `index` is the number of the sample among a request's n samples, from 0. The sample's seed is the
    request's seed + `index`.
    """
    output_ids: list[int] = []
    mask = allowed_mask(params.allowed_token_ids)
    row = SamplingState(params, prompt_ids, output_ids, seed_of(params) + index, mask=mask)

    def choose(logits: Tensor) -> int:
        token_id = int(sample(logits[None], [row])[0])
        output_ids.append(token_id)
        return token_id

    return choose
