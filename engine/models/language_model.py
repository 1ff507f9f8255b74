"""The interface of a model, whatever its architecture. Part 1.

    hidden[T, D] = model(token_ids[T], positions[T], attend)
    logits[R, V] = model.logits(hidden[rows])

The T tokens of all sequences lie end to end on one axis. Only `attend` knows which tokens form a sequence,
and where keys and values are stored.
"""

from torch import Tensor, nn

from engine.models.config import ModelConfig
from engine.models.weights import Module


class LanguageModel(Module):
    """The base class of each architecture's `Model`.

    A subclass defines `forward`, which computes hidden[T, D].
    """

    config: ModelConfig
    head: nn.Module  # the output layer: hidden[R, D] -> logits[R, V]
    has_head = True  # False on a rank that chooses no token: its `head` gives logits[R, 0] (Extension A)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden[R, D] -> logits[R, V], for the R rows that the caller selects from the T rows of `forward`.

        Most rows need no logits: the token after them is already known.
        """
        return self.head(hidden)
