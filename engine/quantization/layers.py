"""A quantized model's layers: linear layers and an embedding whose weights are codes. Part 17.

Promises the interface of nn.Linear (`in_features`, `out_features`, x[T, in] -> [T, out]) and nn.Embedding. So
LoRA can wrap a quantized layer (Part 18), and `pack_linears` leaves a quantized layer alone. A new layer
computes with the functions of products.py. `pack()` chooses the fastest kernel for the layer's device. A
packed layer cannot be saved. quantize.py decides which layer of a model gets which class.
"""

import torch
from torch import Tensor

from engine.models.weights import Module
from engine.quantization import cpu
from engine.quantization.codes import (
    dequantize_groups,
    pack_nibbles,
    quantize_groups,
    quantize_rows,
    unpack_nibbles,
)
from engine.quantization.packed import Packed, Product
from engine.quantization.products import (
    linear_by_groups,
    linear_by_rows,
    linear_of_codes,
    quantize_activations,
)


class Int8Linear(Module):
    """A linear layer with weights in int8 and a scale for each output channel. x is not quantized."""

    method = "int8"
    packed_bytes = 0  # bytes in a kernel's own layout; if there are any, `codes` are deleted
    codes: Tensor  # [out, in] in int8
    scale: Tensor  # [out] in fp32
    bias: Tensor  # [out]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        device: torch.device,
        dtype: torch.dtype,
        group_size: int | None = None,
    ) -> None:
        """Make a layer without values, which `set_weight` or a checkpoint fills. `dtype`: of the bias.
        `group_size` has no effect here: all classes of LINEARS are made with the same arguments.
        """
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.product: Product | None = None
        self.register_buffer("codes", torch.empty(out_features, in_features, device=device, dtype=torch.int8))
        self.register_buffer("scale", torch.empty(out_features, device=device))
        self.register_buffer("bias", torch.empty(out_features, device=device, dtype=dtype))

    @torch.no_grad()
    def set_weight(self, weight: Tensor, bias: Tensor | None, row_max: Tensor | None = None) -> None:
        """Quantize weight[out, in]. bias[out] is not quantized; None: zeros. `row_max`[out]: the largest
        magnitude of each row, if `weight` has only some of the row's columns (Extension A).
        """
        if row_max is not None:  # as one more column, so that the row gets the scale of the whole row
            weight = torch.cat([weight, row_max[:, None]], 1)  # [out, in + 1]
        codes, scale = quantize_rows(weight)
        self.codes.copy_(codes[:, : self.in_features])
        self.scale.copy_(scale)
        self.bias.copy_(torch.zeros_like(self.bias) if bias is None else bias)

    def weight_in_fp32(self) -> Tensor:
        """The weights [out, in] that the codes stand for."""
        return self.codes * self.scale[:, None]

    def forward(self, x: Tensor) -> Tensor:
        """x[T, in] -> [T, out]"""
        return self.plain(x) if self.product is None else self.product(x)

    def plain(self, x: Tensor) -> Tensor:
        """x[T, in] -> [T, out] by products.py, whose result every kernel must match."""
        return linear_by_rows(x, self.codes, self.scale, self.bias)

    def pack(self, may_repack: bool = True) -> None:
        """Choose the fastest kernel for the layer's device. A second call does nothing.

        `may_repack`: whether the kernel may hold a copy of the codes in its own layout; the layer's `codes`
        are then deleted. False saves memory if another layer shares the codes.
        """
        if self.product is not None:
            return
        if self.codes.is_cuda:
            from engine.quantization import gpu  # imported here, since triton is optional

            packed = gpu.pack_int8(self.codes, self.scale, self.bias)
        else:
            packed = self._pack_on_cpu(may_repack)
        self.product, self.packed_bytes = packed
        if self.packed_bytes:
            del self.codes

    def _pack_on_cpu(self, may_repack: bool) -> Packed:
        """What `pack` needs on a CPU: the product, and the bytes of its own copy of the codes."""
        return cpu.pack_int8(self.codes, self.scale, self.bias, may_repack)


class Int8DynamicLinear(Int8Linear):
    """`Int8Linear` for CPUs whose activations become int8, too, so that whole numbers are multiplied.

    Each row of x gets its codes and its scale when the layer is called.
    """

    method = "int8_dynamic"

    def plain(self, x: Tensor) -> Tensor:
        """x[T, in] -> [T, out] by products.py, whose result every kernel must match."""
        x_codes, x_scale = quantize_activations(x.float(), cpu.max_activation_level())
        return linear_of_codes(x_codes, x_scale, self.codes, self.scale, self.bias).to(x.dtype)

    def _pack_on_cpu(self, may_repack: bool) -> Packed:  # `may_repack` has no effect on this class
        return cpu.pack_int8_dynamic(self.codes, self.scale, self.bias)


class Int4Linear(Module):
    """A linear layer with weights in four bits, two to a byte. Each group of `group_size` neighbours in a row
    has a scale and a low (codes.py).
    """

    method = "int4"
    packed_bytes = 0  # in a kernel's own layout; if there are any, `nibbles`, `scale`, `low` are deleted
    nibbles: Tensor  # [out, ceil(in / 2)] in uint8: the codes, two to a byte
    scale: Tensor  # [out, groups] in fp16
    low: Tensor  # [out, groups] in fp16
    bias: Tensor  # [out]

    def __init__(
        self, in_features: int, out_features: int, device: torch.device, dtype: torch.dtype, group_size: int
    ) -> None:
        """Make a layer without values, which `set_weight` or a checkpoint fills. `dtype`: of the bias."""
        super().__init__()
        self.in_features, self.out_features, self.group_size = in_features, out_features, group_size
        self.product: Product | None = None
        num_groups, num_bytes = -(-in_features // group_size), -(-in_features // 2)  # of a row, rounded up
        nibbles = torch.empty(out_features, num_bytes, device=device, dtype=torch.uint8)
        self.register_buffer("nibbles", nibbles)
        for name in ("scale", "low"):
            empty = torch.empty(out_features, num_groups, device=device, dtype=torch.float16)
            self.register_buffer(name, empty)
        self.register_buffer("bias", torch.empty(out_features, device=device, dtype=dtype))

    @torch.no_grad()
    def set_weight(self, weight: Tensor, bias: Tensor | None) -> None:
        """Quantize weight[out, in]. bias[out] is not quantized; None: zeros. Raises ValueError if fp16 cannot
        hold a weight.
        """
        codes, scale, low = quantize_groups(weight, self.group_size)
        self.nibbles.copy_(pack_nibbles(codes))
        self.scale.copy_(scale)
        self.low.copy_(low)
        self.bias.copy_(torch.zeros_like(self.bias) if bias is None else bias)

    def weight_in_fp32(self) -> Tensor:
        """The weights [out, in] that the codes stand for."""
        codes = unpack_nibbles(self.nibbles, self.in_features)
        return dequantize_groups(codes, self.scale, self.low, self.group_size)

    def forward(self, x: Tensor) -> Tensor:
        """x[T, in] -> [T, out]"""
        return self.plain(x) if self.product is None else self.product(x)

    def plain(self, x: Tensor) -> Tensor:
        """x[T, in] -> [T, out] by products.py, whose result every kernel must match."""
        return linear_by_groups(x, self.nibbles, self.scale, self.low, self.bias, self.group_size)

    def pack(self, may_repack: bool = True) -> None:
        """As `Int8Linear.pack`. `may_repack` is ignored, since no other layer reads these codes."""
        if self.product is not None:
            return
        if self.nibbles.is_cuda:
            from engine.quantization import gpu  # imported here, since triton is optional

            packed = gpu.pack_int4(self.nibbles, self.scale, self.low, self.bias, self.group_size)
        else:
            packed = cpu.pack_int4(
                self.nibbles, self.in_features, self.scale, self.low, self.bias, self.group_size
            )
        self.product, self.packed_bytes = packed
        if self.packed_bytes:
            del self.nibbles, self.scale, self.low


class Int8Embedding(Module):
    """An embedding table in int8 with a scale for each row. A token's vector is its row's codes times the
    row's scale.
    """

    codes: Tensor  # [rows, width] in int8
    scale: Tensor  # [rows, 1] in fp32

    def __init__(self, rows: int, width: int, device: torch.device, dtype: torch.dtype) -> None:
        """Make a table without values, which `set_weight` or a checkpoint fills. `dtype`: of the result."""
        super().__init__()
        self.dtype = dtype
        self.register_buffer("codes", torch.empty(rows, width, device=device, dtype=torch.int8))
        self.register_buffer("scale", torch.empty(rows, 1, device=device))

    @torch.no_grad()
    def set_weight(self, weight: Tensor) -> None:
        """Quantize weight[rows, width]."""
        codes, scale = quantize_rows(weight)
        self.codes.copy_(codes)
        self.scale.copy_(scale[:, None])

    def forward(self, token_ids: Tensor) -> Tensor:
        """token_ids[T] -> [T, width]. As in nn.Embedding, an id outside the table raises IndexError on a CPU,
        and fails an assertion on a GPU.
        """
        codes = torch.embedding(self.codes, token_ids)  # [T, width]
        scale = torch.embedding(self.scale, token_ids)  # [T, 1]
        return (codes * scale).to(self.dtype)


QuantizedLinear = Int8Linear | Int4Linear  # Int8DynamicLinear is an Int8Linear
LINEARS: dict[str, type[Int8Linear] | type[Int4Linear]] = {
    layer_class.method: layer_class for layer_class in (Int8Linear, Int4Linear, Int8DynamicLinear)
}
