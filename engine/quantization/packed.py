"""`Packed`: the product that a quantized layer gets when the layer is packed. Part 17."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

Product = Callable[[Tensor], Tensor]  # x[T, K] -> [T, N]


class Packed(NamedTuple):
    """A layer's product with the weights that its kernel needs."""

    product: Product
    packed_bytes: int = 0  # of weights in the kernel's own layout; 0: the kernel reads the layer's codes
