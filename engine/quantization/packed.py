"""What packing a layer over codes gives. Part 17."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

Product = Callable[[Tensor], Tensor]  # x[T, K] -> [T, N]


class Packed(NamedTuple):
    """A product, and the bytes of weights that it holds in its own layout. 0: it reads the layer's codes."""

    product: Product
    own_bytes: int
