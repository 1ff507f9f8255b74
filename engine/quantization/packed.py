"""What packing a layer over codes gives. Part 17."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

Product = Callable[[Tensor], Tensor]  # x[T, K] -> [T, N]


class Packed(NamedTuple):
    """A product, and the bytes of weights that it holds in a layout of its own; 0: it reads what it was
    given.
    """

    product: Product
    own_bytes: int
