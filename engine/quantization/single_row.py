"""A decode step of one sequence of a quantized GPT-2: what engine/kernels/single_row.py is for plain weights.
Part 17.

Promises products.py's numbers up to rounding. The kernels are in engine/kernels/quantized_row.py; this file
hands them the model. Does not know adapters, nor models whose arithmetic is not GPT-2's. Needs the package
triton.
"""

from typing import TypeGuard

import torch
import triton
from torch import Tensor, nn

from engine.kernels.quantized_row import TILES, embed_codes, norm_product, product_add
from engine.kernels.single_row import Operand, Operands, SingleRow, blocks_of
from engine.layers.replace import linear_names
from engine.models.gpt2 import Model as GPT2
from engine.quantization.layers import Int4Linear, Int8Embedding, QuantizedLinear


class QuantizedSingleRow(SingleRow):
    """`SingleRow` of a model whose linear layers and tables are codes: int8, or int4 with an int8 head."""

    kernels = embed_codes, norm_product, product_add

    def __init__(self, model: GPT2, keys: list[Tensor], values: list[Tensor]) -> None:
        """keys and values by layer: [B, P, H, Dh]. The model is one that `fits`."""
        tables = _table(model.embed), _table(model.embed_position)
        blocks = [
            (
                _norm_linear_operand(block.norm1, block.attention.qkv),
                _linear_operand(block.attention.proj, interleaved=False),
                _norm_linear_operand(block.norm2, block.mlp.up),
                _linear_operand(block.mlp.down, interleaved=True),
            )
            for block in blocks_of(model)
        ]
        embeddings = tuple(tensor for table in tables for tensor in (table.codes, table.scale))
        head = _norm_linear_operand(model.norm, model.head)
        super().__init__(model, keys, values, Operands(embeddings, blocks, head))
        self.tiles = TILES[_layer(blocks_of(model)[0].mlp.up).method]

    @staticmethod
    def fits(model: nn.Module) -> TypeGuard[GPT2]:
        """Whether this is a GPT-2 whose layers are as `quantize` made them: not wrapped, and not in the
        layout of a kernel for CPUs.
        """
        linears = [model.get_submodule(name) for name in linear_names(model)]
        return (
            isinstance(model, GPT2)
            and SingleRow.supports(model.config)
            and len(linears) == 4 * model.config.num_layers + 1
            and all(_is_readable(layer) for layer in linears)
            and all(isinstance(table, Int8Embedding) for table in (model.embed, model.embed_position))
        )


def _is_readable(layer: nn.Module) -> bool:
    """Whether the kernels compute this layer: int8 or int4, its codes where they were, in words of eight."""
    return (
        isinstance(layer, QuantizedLinear)
        and layer.method in TILES
        and layer.own_bytes == 0
        and layer.in_features % 8 == 0
    )


def _layer(module: nn.Module) -> QuantizedLinear:
    """The same module, with its type: GPT-2's file declares the nn.Linear that was there before (`fits`)."""
    assert isinstance(module, QuantizedLinear)
    return module


def _table(module: nn.Module) -> Int8Embedding:
    """As `_layer`, of an embedding."""
    assert isinstance(module, Int8Embedding)
    return module


def _norm_linear_operand(norm: nn.LayerNorm, linear: nn.Module) -> Operand:
    """A norm and the linear layer behind it, for `norm_product`.

    The norm has gain g[K] and bias b[K]; m is the mean of x[K], s its standard deviation. The layer has
    weights W[N, K], which its codes stand for, and bias c[N]. Together they compute

        W·(g·(x - m)/s + b) + c = (W·(g·x) - m·(W·g))/s + (W·b + c).

    Only x, m and s change from step to step. So W·g (`weight_gain`[N]) and W·b + c (`weight_bias`[N]) are
    computed here, once, by the layer itself: of a vector v it gives W·v + c.
    """
    layer = _layer(linear)
    words, constants = _words(layer)
    gain_and_bias = torch.stack([norm.weight, norm.bias]).float()  # [2, K]
    weight_gain, weight_bias = layer(gain_and_bias).float()  # [N] each: W·g + c, and W·b + c
    weight_gain = weight_gain - layer.bias.float()  # [N]: W·g
    weight_bias = weight_bias.clone()  # so that it begins at a multiple of 16 bytes, whatever N is
    interleaved_gain = (
        norm.weight.view(-1, 8).t().contiguous()
    )  # [8, K / 8]: interleaved, as x is (digits.py)
    return Operand((*words, interleaved_gain, weight_gain, weight_bias), constants)


def _linear_operand(linear: nn.Module, interleaved: bool) -> Operand:
    """A linear layer, for `product_add`. `interleaved`: so is the vector that it reads (digits.py)."""
    layer = _layer(linear)
    words, constants = _words(layer)
    return Operand((*words, layer.bias), constants | {"INTERLEAVED": interleaved})


def _words(layer: QuantizedLinear) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, int]]:
    """The layer's words[N, K / 8] of eight codes, its scale, and its low (int8 has none: its scale again);
    and the kernels' constants.
    """
    K = layer.in_features
    constants = {"N": layer.out_features, "K": K, "WORDS": max(4, triton.next_power_of_2(K // 8))}
    if isinstance(layer, Int4Linear):
        tensors = layer.packed.view(torch.int32), layer.scale, layer.low
        return tensors, constants | {"GROUP": layer.group_size}
    return (layer.codes.view(torch.int64), layer.scale, layer.scale), constants | {"GROUP": 0}
