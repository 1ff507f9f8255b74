"""What the rest of the engine may ask of a model, whatever its architecture. Part 1.

    hidden[T, D] = model(token_ids[T], positions[T], attend)
    logits[R, V] = model.logits(hidden[rows])

T tokens lie end to end on one axis; whose they are, and where keys and values live, is `attend`'s business.
"""

from torch import Tensor, nn

from engine.models.config import ModelConfig
from engine.models.weights import Module


class LanguageModel(Module):
    """What each architecture's `Model` is. It has `forward` to add, which computes the hidden states."""

    config: ModelConfig
    head: nn.Module  # the output layer: hidden[R, D] -> logits[R, V]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden[R, D] -> [R, V]: for the chosen rows only, since most tokens' logits are never looked at."""
        return self.head(hidden)
