"""A decode step of one sequence for a quantized GPT-2, as engine/kernels/single_row.py for plain weights.
Part 17.

Promises the numbers of products.py up to rounding. engine/kernels/quantized_row.py has the kernels; this
module passes the model's weights to the kernels. Does not compute adapters, nor models with another
arithmetic than GPT-2's. Needs the package triton.
"""

from typing import TypeGuard

import torch
import triton
from torch import Tensor, nn

from engine.kernels.plain_layers import NAME_DOTS, gpt2_blocks
from engine.kernels.quantized_row import TILES, embed_codes, norm_product, product_add
from engine.kernels.single_row import BlockOperands, Kernels, Operand, Operands, SingleRow
from engine.layers.replace import linear_names
from engine.models.gpt2 import Model as GPT2
from engine.quantization.layers import Int4Linear, Int8Embedding, QuantizedLinear


class QuantizedSingleRow(SingleRow):
    """`SingleRow` for a model whose linear layers and embeddings are int8, or int4 with an int8 head."""

    kernels = Kernels(embed_codes, norm_product, product_add)

    def __init__(self, model: GPT2, keys: list[Tensor], values: list[Tensor]) -> None:
        """`keys` and `values`: one tensor [B, P, H, Dh] for each layer. `fits(model)` must be true."""
        tokens, positions = _as_int8_embedding(model.embed), _as_int8_embedding(model.embed_position)
        blocks = [
            BlockOperands(
                qkv=_norm_linear_operand(block.norm1, block.attention.qkv),
                proj=_linear_operand(block.attention.proj, interleaved=False),
                up=_norm_linear_operand(block.norm2, block.mlp.up),
                down=_linear_operand(block.mlp.down, interleaved=True),
            )
            for block in gpt2_blocks(model)
        ]
        embeddings = tokens.codes, tokens.scale, positions.codes, positions.scale
        head = _norm_linear_operand(model.norm, model.head)
        super().__init__(model, keys, values, Operands(embeddings, blocks, head))
        self.tiles = TILES[_as_quantized(gpt2_blocks(model)[0].mlp.up).method]

    @staticmethod
    def fits(model: nn.Module) -> TypeGuard[GPT2]:
        """Whether this class computes the model: a GPT-2 with a config that `SingleRow.supports` accepts. Its
        layers must be as `quantize` makes them: not wrapped, and each of them `_is_readable`.
        """
        # The layers in the model's own places. A wrapper in such a place either is a linear layer itself, and
        # not readable, or is missing from this list.
        names = [name for name in linear_names(model) if name.count(".") <= NAME_DOTS]
        linears = [model.get_submodule(name) for name in names]
        return (
            isinstance(model, GPT2)
            and SingleRow.supports(model.config)
            and len(linears) == 4 * model.config.num_layers + 1
            and all(_is_readable(layer) for layer in linears)
            and all(isinstance(table, Int8Embedding) for table in (model.embed, model.embed_position))
        )


def _is_readable(layer: nn.Module) -> bool:
    """Whether the kernels compute this layer: int8 or int4, with codes in the layer's layout and not in that
    of a kernel for CPUs, and with rows of a multiple of eight codes.
    """
    return (
        isinstance(layer, QuantizedLinear)
        and layer.method in TILES
        and layer.packed_bytes == 0
        and layer.in_features % 8 == 0
    )


def _as_quantized(module: nn.Module) -> QuantizedLinear:
    """The same module as a QuantizedLinear. GPT-2's class declares nn.Linear, which `quantize` replaced."""
    assert isinstance(module, QuantizedLinear)
    return module


def _as_int8_embedding(module: nn.Module) -> Int8Embedding:
    """The same module as an Int8Embedding. GPT-2's class declares nn.Embedding, which `quantize` replaced."""
    assert isinstance(module, Int8Embedding)
    return module


def _norm_linear_operand(norm: nn.LayerNorm, linear: nn.Module) -> Operand:
    """A norm and the linear layer that follows the norm, for `norm_product`.

    The norm has gain g[K] and bias b[K]. The mean of x[K] is m, and its standard deviation is s. The layer's
    codes stand for weights W[N, K], and its bias is c[N]. Norm and layer together compute

        W·(g·(x - m)/s + b) + c = (W·(g·x) - m·(W·g))/s + (W·b + c).

    Only x, m and s change from step to step. So W·g (`weight_gain`[N]) and W·b + c (`weight_bias`[N]) are
    computed here, once. For a vector v the layer computes W·v + c: one call with g and b gives both.
    """
    layer = _as_quantized(linear)
    codes = _codes_operand(layer)
    gain_and_bias = torch.stack([norm.weight, norm.bias]).float()  # [2, K]
    weight_gain, weight_bias = layer(gain_and_bias).float()  # [N] each: W·g + c, and W·b + c
    weight_gain = weight_gain - layer.bias.float()  # [N]: W·g
    weight_bias = weight_bias.clone()  # a copy begins at a multiple of 16 bytes, also if N is odd
    interleaved_gain = norm.weight.view(-1, 8).t().contiguous()  # [8, K / 8], in the order of x (digits.py)
    return Operand((*codes.tensors, interleaved_gain, weight_gain, weight_bias), codes.constants)


def _linear_operand(linear: nn.Module, interleaved: bool) -> Operand:
    """A linear layer, for `product_add`. `interleaved`: whether the layer's input is (digits.py)."""
    layer = _as_quantized(linear)
    codes = _codes_operand(layer)
    return Operand((*codes.tensors, layer.bias), codes.constants | {"INTERLEAVED": interleaved})


def _codes_operand(layer: QuantizedLinear) -> Operand:
    """The first arguments of both kernels: words, scale and low, and the constants.

    words[N, K / 8] hold eight codes each. int8 has no `low`: the scale stands in its place, and the kernels
    do not read the second copy.
    """
    K = layer.in_features
    constants = {"N": layer.out_features, "K": K, "WORDS": max(4, triton.next_power_of_2(K // 8))}
    if isinstance(layer, Int4Linear):
        tensors = layer.nibbles.view(torch.int32), layer.scale, layer.low
        return Operand(tensors, constants | {"GROUP": layer.group_size})
    return Operand((layer.codes.view(torch.int64), layer.scale, layer.scale), constants | {"GROUP": 0})
