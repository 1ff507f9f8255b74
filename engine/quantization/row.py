"""A decode step of one sequence of a quantized GPT-2: Part 13's chain of few kernels, over codes. Part 17.

Promises products.py's numbers up to rounding. Its kernels are in engine/kernels/quantized_row.py. Does not
know adapters, nor models whose arithmetic is not GPT-2's. Needs the package triton.
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


class QuantizedRow(SingleRow):
    """`SingleRow` of a model whose linear layers and tables are codes: int8, or int4 with an int8 head."""

    kernels = embed_codes, norm_product, product_add

    def __init__(self, model: GPT2, keys: list[Tensor], values: list[Tensor]) -> None:
        """keys and values by layer: [B, P, H, Dh]. The model is one that `fits`."""
        tables = _table(model.embed), _table(model.embed_position)
        blocks = [
            (
                _behind_norm(block.norm1, block.attention.qkv), _plain(block.attention.proj, placed=False),
                _behind_norm(block.norm2, block.mlp.up), _plain(block.mlp.down, placed=True),
            )
            for block in blocks_of(model)
        ]  # fmt: skip
        embeddings = tuple(tensor for table in tables for tensor in (table.codes, table.scale))
        head = _behind_norm(model.norm, model.head)
        super().__init__(model, keys, values, Operands(embeddings, blocks, head))
        self.tiles = TILES[_layer(blocks_of(model)[0].mlp.up).method]

    @staticmethod
    def fits(model: nn.Module) -> TypeGuard[GPT2]:
        """Whether this is a GPT-2 whose layers are as `quantize` made them, with their codes where they were
        (a kernel for CPUs may have put them in a layout of its own).
        """
        linears = [model.get_submodule(name) for name in linear_names(model)]
        return (
            isinstance(model, GPT2)
            and SingleRow.knows(model.config)
            and len(linears) == 4 * model.config.num_layers + 1
            and all(_has_codes(layer) for layer in linears)
            and all(isinstance(table, Int8Embedding) for table in (model.embed, model.embed_position))
        )


def _has_codes(layer: nn.Module) -> bool:
    """Whether its words of eight codes can be read, and nothing else is coded (int8_dynamic: activations)."""
    return (
        isinstance(layer, QuantizedLinear)
        and layer.method in TILES
        and layer.own_bytes == 0
        and layer.in_features % 8 == 0
    )


def _layer(module: nn.Module) -> QuantizedLinear:
    """`fits` has looked: it is no longer the linear layer that GPT-2's file declares."""
    assert isinstance(module, QuantizedLinear)
    return module


def _table(module: nn.Module) -> Int8Embedding:
    assert isinstance(module, Int8Embedding)
    return module


def _behind_norm(norm: nn.LayerNorm, linear: nn.Module) -> Operand:
    """What no step changes: W, g in the kernels' `place`s, W·g, and W·b + c."""
    layer = _layer(linear)
    words, constants = _words(layer)
    both = torch.stack([norm.weight, norm.bias]).float()  # [2, K]
    gain, shift = layer(both).float()  # [N] each
    placed = norm.weight.view(-1, 8).t().contiguous()
    return Operand(
        (*words, placed, gain - layer.bias.float(), shift.clone()), constants
    )  # where 16 bytes begin


def _plain(linear: nn.Module, placed: bool) -> Operand:
    """`placed`: what the layer reads lies in the kernels' `place`s."""
    layer = _layer(linear)
    words, constants = _words(layer)
    return Operand((*words, layer.bias), constants | {"PLACED": placed})


def _words(layer: QuantizedLinear) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, int]]:
    """Words[N, K / 8] of eight codes, scale, and low (int8 has none: its scale again); and the kernels'
    constants.
    """
    K = layer.in_features
    constants = {"N": layer.out_features, "K": K, "WORDS": max(4, triton.next_power_of_2(K // 8))}
    if isinstance(layer, Int4Linear):
        tensors = layer.packed.view(torch.int32), layer.scale, layer.low
        return tensors, constants | {"GROUP": layer.group_size}
    return (layer.codes.view(torch.int64), layer.scale, layer.scale), constants | {"GROUP": 0}
