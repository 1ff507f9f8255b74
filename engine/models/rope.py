"""Rotary position embedding (RoPE): a token's position, encoded by rotating its queries and keys. Part 20.

Numbers i and i + Dh/2 of a head form a point in the plane. At position p, the point is rotated by the angle
p · f[i], where f[i] is the frequency of pair i. The product of a query and a key then depends on the distance
between the two tokens and not on their positions. No weights are learned, and there is no table of positions.

Some checkpoints scale the frequencies for texts that are longer than the texts of their training. Promises
Hugging Face's numbers for the scalings of Llama and Qwen3 checkpoints, and refuses any other scaling by name.
Sources: Su et al. 2021, https://arxiv.org/abs/2104.09864; YaRN: Peng et al. 2023,
https://arxiv.org/abs/2309.00071.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.checkpoint import CheckpointError

DEFAULT_THETA = 10_000.0


@dataclass(frozen=True)
class Rope:
    """The frequency at which each pair of a head's numbers rotates, and a scale."""

    frequencies: tuple[float, ...]  # [Dh/2]: radians per position
    scale: float = 1.0  # a factor of all rotated queries and keys

    def angles(self, positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions[T] -> (cosines, sines), [T, 1, Dh/2] each, in `dtype` and multiplied by `scale`.

        `frequencies`: `self.frequencies` as an fp32 tensor [Dh/2] on the device of `positions`. The caller
        makes this tensor once, so that a step copies nothing. One call serves all layers of a step.
        """
        radians = (positions[:, None].float() * frequencies)[:, None]  # [T, 1, Dh/2]
        return (radians.cos() * self.scale).to(dtype), (radians.sin() * self.scale).to(dtype)


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """x[T, H, Dh] -> [T, H, Dh]: pair (i, i + Dh/2) of each head, rotated by angle i of the token.

    `angles` has the cosines and sines of the angles, [T, 1, Dh/2] each. The rotation is counterclockwise: 90°
    takes (a, b) to (-b, a). The tensor x itself does not change.
    """
    cos, sin = angles  # [T, 1, Dh/2]
    a, b = x.chunk(2, dim=-1)  # [T, H, Dh/2] each
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def rope_from(raw: dict, head_dim: int) -> Rope:
    """The Rope that a config.json, given as `raw`, describes.

    The settings are in `rope_parameters` (transformers 5), or in `rope_theta` and `rope_scaling`. Raises
    KeyError without `max_position_embeddings`, and CheckpointError if `head_dim` is odd, if the settings
    differ from layer to layer, rotate only a share of a head, or have a scaling that is not in SCALINGS, or
    if a number that the scaling needs is missing, not above 0 or in contradiction to another.
    """
    if head_dim % 2:
        raise CheckpointError(f"head_dim={head_dim} is odd: rotary embeddings need pairs")
    settings = _settings_of(raw)
    rotary_share = settings.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if rotary_share not in (None, 1):
        raise CheckpointError(f"partial_rotary_factor={rotary_share} is not supported, only 1")
    rope_type = settings.get("rope_type") or settings.get("type") or "default"
    if rope_type not in SCALINGS:
        raise CheckpointError(f"rope_type={rope_type!r} is not supported, only {', '.join(SCALINGS)}")
    # Compute in fp32 like Hugging Face: at position 100,000 the last bit of a frequency changes the angle.
    theta = _number(settings, "rope_theta")
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float)  # [Dh/2]
    periods = theta ** (pairs / head_dim)  # [Dh/2]: the positions in which a pair rotates by 1 radian
    frequencies, scale = SCALINGS[rope_type](periods, settings)
    return Rope(tuple(frequencies.tolist()), scale)


def _settings_of(raw: dict) -> dict:
    """The settings of the rotation in a config.json, given as `raw`. Three settings are always there:

    - `rope_theta`: the base of the frequencies.
    - `max_position_embeddings`: the longest text that the model accepts.
    - `original_max_position_embeddings`: the longest text of its training.

    Raises errors as `rope_from` does.
    """
    settings = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(settings, dict) or any(isinstance(value, dict) for value in settings.values()):
        raise CheckpointError(f"rope_parameters={settings!r} is not supported, only one set for all layers")
    longest = raw["max_position_embeddings"]
    trained = raw.get("original_max_position_embeddings") or settings.get("original_max_position_embeddings")
    complete = {"rope_theta": raw.get("rope_theta") or DEFAULT_THETA} | settings
    complete["max_position_embeddings"] = longest
    complete["original_max_position_embeddings"] = trained or longest
    return complete


def _number(settings: dict, name: str, default: float | None = None) -> float:
    """settings[name], or `default` if it is missing.

    Raises CheckpointError if both are missing, or if the value is not a finite number above 0.
    """
    value = settings.get(name)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"rope_parameters has no {name!r}")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise CheckpointError(f"rope_parameters: {name}={value!r}: a number above 0 is accepted")
    return value


def _default(periods: Tensor, settings: dict) -> tuple[Tensor, float]:
    """No scaling: the frequencies of the original RoPE."""
    return 1.0 / periods, 1.0


def _linear(periods: Tensor, settings: dict) -> tuple[Tensor, float]:
    """All pairs rotate slower by `factor`, as if all positions were divided by `factor`."""
    return 1.0 / periods / _number(settings, "factor"), 1.0


def _llama3(periods: Tensor, settings: dict) -> tuple[Tensor, float]:
    """The frequencies of slow pairs are divided by `factor`, and those of fast pairs are not.

    A pair is fast if it makes more than high_freq_factor rotations within the length of training: fast pairs
    distinguish neighbouring tokens. A pair is slow if it makes fewer than low_freq_factor rotations. A pair
    between the two limits gets a weighted mean of both frequencies.
    """
    factor, trained = _number(settings, "factor"), _number(settings, "original_max_position_embeddings")
    low, high = _number(settings, "low_freq_factor"), _number(settings, "high_freq_factor")
    if low >= high:
        raise CheckpointError(f"rope_parameters: low_freq_factor={low} must be below high_freq_factor={high}")
    plain = 1.0 / periods
    wavelength = 2 * math.pi / plain  # [Dh/2]: the positions of one complete rotation
    rotations = trained / wavelength  # [Dh/2]: within the length of training
    fast = ((rotations - low) / (high - low)).clamp(0, 1)  # [Dh/2]: 1 for a fast pair, 0 for a slow pair
    return (1 - fast) * plain / factor + fast * plain, 1.0


def _yarn(periods: Tensor, settings: dict) -> tuple[Tensor, float]:
    """As `_llama3`, with other limits between fast and slow pairs, and with a scale.

    The limits are `beta_fast` and `beta_slow` rotations (32 and 1 by default) within the length of training.
    Between the limits, the weight of the mean is linear in the pair's index. Queries and keys are multiplied
    by `_yarn_scale`, mostly a little above 1, which sharpens the attention over many keys.
    """
    trained = _number(settings, "original_max_position_embeddings")
    factor = _number(settings, "factor", default=settings["max_position_embeddings"] / trained)
    theta = _number(settings, "rope_theta")
    Dh = 2 * len(periods)

    def pair_index(rotations: float) -> float:
        """The index, as a float, of the pair that makes this number of rotations within `trained`."""
        return Dh * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = pair_index(_number(settings, "beta_fast", default=32.0))
    high = pair_index(_number(settings, "beta_slow", default=1.0))
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, Dh - 1)
    width = 0.001 if high == low else high - low  # not 0, because it is a divisor
    ramp = (torch.arange(Dh // 2, dtype=torch.float) - low) / width  # [Dh/2]
    fast = 1 - ramp.clamp(0, 1)  # [Dh/2]: 1 for a fast pair, 0 for a slow pair
    frequencies = 1.0 / (factor * periods) * (1 - fast) + 1.0 / periods * fast
    return frequencies, _yarn_scale(factor, settings)


def _yarn_scale(factor: float, settings: dict) -> float:
    """The factor of queries and keys: the setting `attention_factor`, or YaRN's scale if there is none."""

    def scale_of(weight: float) -> float:
        """YaRN's scale, with its logarithm multiplied by `weight`. 1 if `factor` is at most 1."""
        if factor <= 1:
            return 1.0
        return 0.1 * weight * math.log(factor) + 1.0

    if settings.get("attention_factor") is not None:
        return float(_number(settings, "attention_factor"))
    if settings.get("mscale") and settings.get("mscale_all_dim"):
        return scale_of(_number(settings, "mscale")) / scale_of(_number(settings, "mscale_all_dim"))
    return scale_of(1.0)


# frequencies[Dh/2], scale = scaling(periods[Dh/2], settings), where `periods` has the positions in which each
# pair rotates by 1 radian, and `settings` come from config.json.
SCALINGS: dict[str, Callable[[Tensor, dict], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
