"""Replacing a model's layers by quantized layers, with or without weights. Part 17.

Promises: linear layers are quantized by the chosen method, and embeddings in int8 by rows. The output layer
of an int4 model is in int8, too. An output layer that is tied to the embedding shares the embedding's codes
and scales: a row of the table is an output channel of the head, so one scale serves both. Norms and biases
are not quantized.

The order at load is: merge an adapter, quantize, wrap with adapters, pack. To pack means `pack_linears`
(Part 3), which leaves quantized layers alone, and then `pack_quantized`.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from engine.layers.replace import AnyModel, replace_linears
from engine.models.checkpoint import CheckpointError
from engine.models.config import ModelConfig
from engine.models.weights import Embedding
from engine.quantization.codes import GROUP_SIZES
from engine.quantization.layers import LINEARS, Int8Embedding, Int8Linear, QuantizedLinear

# row_max(a linear layer's name, its weight[out, in]) -> [out]: the largest magnitude in each row of the whole
# layer; None if the weight has whole rows.
RowMax = Callable[[str, Tensor], Tensor | None]
QUANT_METHOD = "ruvon"  # `quant_method` in config.json's quantization_config, as "gptq" or "awq" elsewhere


@dataclass(frozen=True)
class QuantizationConfig:
    """How a model is quantized. Raises ValueError if a field is not valid; the message names the field."""

    method: str  # "int8", "int4" or "int8_dynamic"
    group_size: int = 64  # weights in a row that share a scale: 32, 64 or 128; only int4 reads this field

    def __post_init__(self) -> None:
        if self.method not in LINEARS:
            raise ValueError(f"quantization={self.method!r}: accepted are {', '.join(LINEARS)}, or None")
        if not isinstance(self.group_size, int) or self.group_size not in GROUP_SIZES:
            accepted = ", ".join(map(str, GROUP_SIZES))
            raise ValueError(f"group_size={self.group_size!r}: accepted are {accepted}")

    def as_json(self) -> dict[str, Any]:
        """The value of `quantization_config` in config.json."""
        return {"quant_method": QUANT_METHOD} | asdict(self)

    @classmethod
    def from_json(cls, raw: Any) -> "QuantizationConfig":
        """Read the value of `quantization_config` in config.json. Raises CheckpointError if `quant_method` is
        another program's, a field is unknown, or a value is not valid.
        """
        quant_method = raw.get("quant_method") if isinstance(raw, dict) else raw
        if not isinstance(raw, dict) or quant_method != QUANT_METHOD:
            raise CheckpointError(
                f"quantization_config: quant_method={quant_method!r} is not supported, only "
                f"{QUANT_METHOD!r}; take the model's checkpoint in full precision, and "
                "quantization='int4' or 'int8'"
            )
        fields = {name: value for name, value in raw.items() if name != "quant_method"}
        unknown = sorted(set(fields) - {"method", "group_size"})
        if unknown:
            raise CheckpointError(
                f"quantization_config: {unknown[0]!r} is not known; known are method, group_size"
            )
        try:
            return cls(**fields)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"quantization_config: {error}") from None


def quantize(
    model: AnyModel, method: str, group_size: int | None = None, row_max: RowMax | None = None
) -> AnyModel:
    """Replace the model's linear layers and embeddings in place, one after the other; returns the model.
    `row_max` is for a model that is one device's part: some of its layers have parts of rows (Extension A).

    Used as `load_model(transform=)`. A model that is quantized in the same way already is not changed.
    `group_size`: 32, 64 or 128, for int4 only; None: 64.

    Raises ValueError if the method is unknown, if `group_size` is not valid or the method has no groups, if
    the method does not run on the model's device, if the model is quantized in another way already, if a
    matrix of weights is neither a linear layer's nor an embedding's, or if int4's fp16 cannot hold a weight.
    """
    config = QuantizationConfig(method, 64 if group_size is None else group_size)
    if group_size is not None and method != "int4":
        raise ValueError(f"group_size={group_size}: {method} has no groups, only int4 has")
    device = next(model.parameters()).device
    if method == "int8_dynamic" and device.type != "cpu":
        raise ValueError(f"quantization='int8_dynamic' runs on a CPU, not on {device}: use int8 there")
    current = quantization_of(model)
    if current is None:
        _refuse_other_matrices(model, method)
        return _replace(model, config, fill=True, row_max=row_max)
    is_same = current.method == method and (group_size is None or group_size == current.group_size)
    if not is_same:
        groups = f" with group_size={current.group_size}" if current.method == "int4" else ""
        raise ValueError(
            f"quantization={method!r}: this model is quantized already, by {current.method!r}{groups}; "
            "the same or None is accepted"
        )
    return model


def _refuse_other_matrices(model: nn.Module, method: str) -> None:
    """Raises ValueError if a matrix of weights is neither a linear layer's nor a table's: it would stay as it
    is, though it may be most of the model (experts whose weights lie in one tensor).
    """
    shapes: dict[str, torch.Size] = {}  # of such matrices, by name
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear | nn.Embedding):
            for leaf, parameter in module.named_parameters(recurse=False):
                if parameter.dim() > 1:
                    shapes[f"{name}.{leaf}"] = parameter.shape
    if shapes:
        largest = max(shapes, key=lambda name: shapes[name].numel())
        raise ValueError(
            f"quantization={method!r}: {largest} of shape {tuple(shapes[largest])} is no linear "
            "layer's weight; models of linear layers and embeddings alone are quantized"
        )


def quantization_of(model: nn.Module) -> QuantizationConfig | None:
    """How a model is quantized; None if the model is not quantized. `quantize` and `skeleton` note it."""
    return getattr(model, "quantization", None)


def is_tied(model: nn.Module) -> bool:
    """Whether the output layer shares the embedding's weights."""
    # The type of an attribute of nn.Module is Tensor or Module, so the config's type needs a cast.
    return cast(ModelConfig, model.config).tie_word_embeddings


def skeleton(model: AnyModel, config: QuantizationConfig) -> AnyModel:
    """Replace the layers of a model on the meta device by quantized layers for a checkpoint to fill."""
    return _replace(model, config, fill=False)


def tie(model: nn.Module) -> None:
    """If the model's head is tied, make the head share the embedding's codes and scales."""
    if is_tied(model):
        head, embed = model.get_submodule("head"), model.get_submodule("embed")
        assert isinstance(head, Int8Linear)
        assert isinstance(embed, Int8Embedding)
        head.codes, head.scale = embed.codes, embed.scale.view(-1)


def pack_quantized(model: AnyModel) -> AnyModel:
    """Give every quantized layer its fastest kernel, in place, also inside wrappers; returns the model. This
    is the last step at load.

    With int4 a tied head reads the embedding's codes, which saves memory. With other methods a tied head may
    get a copy of the codes in the layout of a faster kernel.
    """
    config = quantization_of(model)
    head_shares_codes = config is not None and config.method == "int4" and is_tied(model)
    for name, layer in model.named_modules():
        if isinstance(layer, QuantizedLinear):
            layer.pack(may_repack=not (head_shares_codes and name.startswith("head")))
    return model


def model_bytes(model: nn.Module) -> int:
    """The bytes of a model's parameters, codes and packed layouts in memory. Shared tensors count once."""
    by_address = {tensor.data_ptr(): tensor for tensor in (*model.parameters(), *model.buffers())}
    packed_bytes = sum(layer.packed_bytes for layer in model.modules() if isinstance(layer, QuantizedLinear))
    return packed_bytes + sum(tensor.nbytes for tensor in by_address.values())


def _replace(
    model: AnyModel, config: QuantizationConfig, fill: bool, row_max: RowMax | None = None
) -> AnyModel:
    """`quantize` without its checks. `fill`: whether the new layers get the model's weights; if False, they
    are left without values.
    """
    dtype = next(model.parameters()).dtype

    def make(name: str, linear: nn.Module) -> nn.Module:
        assert isinstance(linear, nn.Linear)  # quantizing comes before wrapping and packing
        method = "int8" if config.method == "int4" and name == "head" else config.method
        layer = LINEARS[method](
            linear.in_features, linear.out_features, linear.weight.device, dtype, config.group_size
        )
        if not fill:
            return layer
        if name == "head" and is_tied(model):
            layer.bias.zero_()  # `tie` gives the head the embedding's codes and scales
        elif row_max is not None and isinstance(layer, Int8Linear):
            layer.set_weight(linear.weight, linear.bias, row_max(name, linear.weight))
        else:
            layer.set_weight(linear.weight, linear.bias)
        return layer

    replace_linears(model, make)
    _replace_embeddings(model, dtype, fill)
    tie(model)
    model.quantization = config  # type: ignore[assignment]  # nn.Module declares tensors and modules only
    return model


def _replace_embeddings(model: nn.Module, dtype: torch.dtype, fill: bool) -> None:
    """Replace the embeddings by int8 tables whose results have this dtype. `fill`: as in `_replace`."""
    tables = [(name, module) for name, module in model.named_modules() if isinstance(module, Embedding)]
    for name, table in tables:
        embedding = Int8Embedding(table.num_embeddings, table.embedding_dim, table.weight.device, dtype)
        if fill:
            embedding.set_weight(table.weight)
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, embedding)
