"""What the rest of the engine may ask of a model, whatever its architecture. Part 1.

    hidden[T, D] = model(token_ids[T], positions[T], attend)
    logits[R, V] = model.logits(hidden[rows])

T tokens lie end to end on one axis. `attend` alone knows their sequences, and where keys and values live.
"""

from torch import Tensor, nn

from engine.models.config import ModelConfig
from engine.models.weights import Module


class LanguageModel(Module):
    """The base of each architecture's `Model`, which adds `forward`: it computes the hidden states."""

    config: ModelConfig
    head: nn.Module  # the output layer: hidden[R, D] -> logits[R, V]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden[R, D] -> [R, V]. R rows, and not all T: most tokens' logits are never used."""
        return self.head(hidden)
