"""Rotary position embedding (RoPE): a token's position, encoded by rotating its queries and keys. Part 20.

Numbers i and i + Dh/2 of a head are a point in the plane, and the token at position p rotates it by the angle
p · f[i]. A query's product with a key then depends on the distance between the two tokens, not on where they
stand. Nothing is learned and there is no table of positions. Promises Hugging Face's numbers for the ways in
which Llama and Qwen3 checkpoints scale the frequencies f for longer texts than they were trained on; other
ways are refused by name. Sources: Su et al. 2021, https://arxiv.org/abs/2104.09864; YaRN: Peng et al. 2023,
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
    """How fast each pair of a head's numbers rotates."""

    frequencies: tuple[float, ...]  # [Dh/2]: radians per position
    scale: float = 1.0  # rotated queries and keys are multiplied by it

    def angles(self, positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions[T] -> cosines and sines, [T, 1, Dh/2] each; once a step, for all layers. `frequencies`:
        as fp32[Dh/2] on the device of `positions`.
        """
        radians = (positions[:, None].float() * frequencies)[:, None]  # [T, 1, Dh/2]
        return (radians.cos() * self.scale).to(dtype), (radians.sin() * self.scale).to(dtype)


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """x[T, H, Dh] -> the same, each head's pairs (i, i + Dh/2) turned by the token's angles.

    angles: cosines and sines, [T, 1, Dh/2] each. Counterclockwise: a turn by 90° takes (a, b) to (-b, a).
    x itself stays as it is.
    """
    cos, sin = angles  # [T, 1, Dh/2]
    a, b = x.chunk(2, dim=-1)  # [T, H, Dh/2] each
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def rope_from(raw: dict, head_dim: int) -> Rope:
    """The Rope of a config.json: of its `rope_parameters` (transformers 5), or `rope_theta` and
    `rope_scaling`.

    Raises CheckpointError: a kind of scaling that is not computed here, or a number that it needs is missing.
    """
    if head_dim % 2:
        raise CheckpointError(f"head_dim={head_dim} is odd: rotary embeddings need pairs")
    settings = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(settings, dict) or any(isinstance(value, dict) for value in settings.values()):
        raise CheckpointError(f"rope_parameters={settings!r} is not supported, only one set for all layers")
    settings = {"rope_theta": raw.get("rope_theta") or DEFAULT_THETA} | settings
    rotary_share = settings.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if rotary_share not in (None, 1):
        raise CheckpointError(f"partial_rotary_factor={rotary_share} is not supported, only 1")
    rope_type = settings.get("rope_type") or settings.get("type") or "default"
    if rope_type not in SCALINGS:
        raise CheckpointError(f"rope_type={rope_type!r} is not supported, only {', '.join(SCALINGS)}")
    max_positions = raw["max_position_embeddings"]
    trained = raw.get("original_max_position_embeddings") or settings.get("original_max_position_embeddings")
    settings |= {
        "original_max_position_embeddings": trained or max_positions,
        "max_position_embeddings": max_positions,
    }
    # All in fp32, as in Hugging Face: at position 100,000 the last bit of a frequency changes the angle.
    theta = _number(settings, "rope_theta")
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float)  # [Dh/2]
    periods = theta ** (pairs / head_dim)  # [Dh/2]: positions in which a pair rotates by 1 radian
    frequencies, scale = SCALINGS[rope_type](periods, settings)
    return Rope(tuple(frequencies.tolist()), scale)


def _number(settings: dict, name: str, default: float | None = None) -> float:
    """settings[name], or `default`. Raises CheckpointError: neither is there, or it is no number above 0."""
    value = settings.get(name)
    value = default if value is None else value
    if value is None:
        raise CheckpointError(f"rope_parameters has no {name!r}")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise CheckpointError(f"rope_parameters: {name}={value!r}: a number above 0 is accepted")
    return value


def _default(periods: Tensor, settings: dict) -> tuple[Tensor, float]:
    """Without scaling."""
    return 1.0 / periods, 1.0


def _linear(periods: Tensor, settings: dict) -> tuple[Tensor, float]:
    """All pairs rotate slower by `factor`: as if the positions were closer together."""
    return 1.0 / periods / _number(settings, "factor"), 1.0


def _llama3(periods: Tensor, settings: dict) -> tuple[Tensor, float]:
    """Pairs that rotate fast stay as they are, since they tell neighbouring tokens apart. Pairs that do not
    complete a rotation within the length of training rotate slower by `factor`. Between the two, a weighted
    mean.
    """
    factor, trained = _number(settings, "factor"), _number(settings, "original_max_position_embeddings")
    low, high = _number(settings, "low_freq_factor"), _number(settings, "high_freq_factor")
    if low >= high:
        raise CheckpointError(f"rope_parameters: low_freq_factor={low} must be below high_freq_factor={high}")
    plain = 1.0 / periods
    wavelength = 2 * math.pi / plain  # [Dh/2]: positions of a complete rotation
    slow = torch.where(wavelength > trained / low, plain / factor, plain)
    share = (trained / wavelength - low) / (high - low)
    between = (wavelength >= trained / high) & (wavelength <= trained / low)
    return torch.where(between, (1 - share) * slow / factor + share * slow, slow), 1.0


def _yarn(periods: Tensor, settings: dict) -> tuple[Tensor, float]:
    """As Llama 3's, but the borders are numbers of rotations within the length of training, and the weight of
    the mean is linear in the pair's index. Queries and keys are multiplied by a number a little above 1,
    which makes attention over more keys sharper.
    """
    trained = _number(settings, "original_max_position_embeddings")
    factor = _number(settings, "factor", settings["max_position_embeddings"] / trained)
    Dh, theta = 2 * len(periods), _number(settings, "rope_theta")

    def pair_index(rotations: float) -> float:
        """The index of the pair with this number of rotations, as a float between two indices."""
        return Dh * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = (pair_index(_number(settings, name, default)) for name, default in YARN_ROTATIONS.items())
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, Dh - 1)
    ramp = (torch.arange(Dh // 2, dtype=torch.float) - low) / (high - low or 0.001)  # never divided by 0
    fast = 1 - ramp.clamp(0, 1)  # [Dh/2]: 1 where nothing is slowed down
    slow = 1.0 / (factor * periods)
    return slow * (1 - fast) + 1.0 / periods * fast, _yarn_scale(factor, settings)


YARN_ROTATIONS = {"beta_fast": 32.0, "beta_slow": 1.0}  # the borders, where config.json does not say


def _yarn_scale(factor: float, settings: dict) -> float:
    """What queries and keys are multiplied by."""

    def scale_of(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if settings.get("attention_factor") is not None:
        return float(_number(settings, "attention_factor"))
    if settings.get("mscale") and settings.get("mscale_all_dim"):
        return scale_of(_number(settings, "mscale")) / scale_of(_number(settings, "mscale_all_dim"))
    return scale_of(1.0)


# (positions in which each pair rotates by 1 radian, [Dh/2]; config.json's settings) -> frequencies[Dh/2],
# scale
SCALINGS: dict[str, Callable[[Tensor, dict], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
