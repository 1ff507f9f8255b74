"""Replaces a model's layers by quantized ones, with weights or without. Part 17.

Promises: every linear layer by the method; embeddings in int8 by rows, whatever the method; with int4 the
output layer in int8. A head that is tied to the embedding shares its codes: a row of the table is an output
channel of the head, so one scale serves both. Norms and biases stay as they are.

Order at load: merge, quantize, wrap, pack. `quantize` first, then `pack_linears` (Part 3), which leaves these
layers alone, and `pack_quantized` last.
"""

from dataclasses import asdict, dataclass
from typing import Any, cast

from torch import nn

from engine.layers.replace import AnyModel, replace_linears
from engine.models.checkpoint import CheckpointError
from engine.models.config import ModelConfig
from engine.quantization.codes import GROUP_SIZES
from engine.quantization.layers import LINEARS, Int8Embedding, Int8Linear, QuantizedLinear

QUANT_METHOD = "ruvon"  # in config.json's quantization_config, where others say "gptq" or "awq"


@dataclass(frozen=True)
class QuantizationConfig:
    """How a model is quantized. Raises ValueError, naming the field and what is accepted."""

    method: str  # int8, int4 or int8_dynamic
    group_size: int = 64  # neighbours in a row that share a scale; int4 only

    def __post_init__(self) -> None:
        if self.method not in LINEARS:
            raise ValueError(f"quantization={self.method!r}: accepted are {', '.join(LINEARS)}, or None")
        if not isinstance(self.group_size, int) or self.group_size not in GROUP_SIZES:
            accepted = ", ".join(map(str, GROUP_SIZES))
            raise ValueError(f"group_size={self.group_size!r}: accepted are {accepted}")

    def as_json(self) -> dict[str, Any]:
        """For config.json."""
        return {"quant_method": QUANT_METHOD} | asdict(self)

    @classmethod
    def from_json(cls, raw: Any) -> "QuantizationConfig":
        """From config.json's `quantization_config`. Raises CheckpointError: another program's quant_method,
        or a field that is not known.
        """
        if not isinstance(raw, dict) or raw.get("quant_method") != QUANT_METHOD:
            quant_method = raw.get("quant_method") if isinstance(raw, dict) else raw
            raise CheckpointError(
                f"quantization_config: quant_method={quant_method!r} is not supported, only {QUANT_METHOD!r}"
            )
        fields = {name: value for name, value in raw.items() if name != "quant_method"}
        if unknown := sorted(set(fields) - {"method", "group_size"}):
            raise CheckpointError(
                f"quantization_config: {unknown[0]!r} is not known; known are method, group_size"
            )
        try:
            return cls(**fields)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"quantization_config: {error}") from None


def quantize(model: AnyModel, method: str, group_size: int | None = None) -> AnyModel:
    """Replace the model's linear layers and embeddings, in place, layer by layer; returns the model. A model
    that is quantized in the same way already stays as it is. `group_size`: of int4; default: 64.

    For `load_model(..., transform=)`. Raises ValueError: an unknown method, a group_size where there are no
    groups, a device it does not run on, or a model that is quantized already by another.
    """
    config = QuantizationConfig(method, 64 if group_size is None else group_size)
    if group_size is not None and method != "int4":
        raise ValueError(f"group_size={group_size}: {method} has no groups, only int4 has")
    device = next(model.parameters()).device
    if method == "int8_dynamic" and device.type != "cpu":
        raise ValueError(f"quantization='int8_dynamic' runs on a CPU, not on {device}: use int8 there")
    if (current := quantization_of(model)) is not None:
        if current.method != method or group_size not in (None, current.group_size):
            groups = f" with group_size={current.group_size}" if current.method == "int4" else ""
            raise ValueError(
                f"quantization={method!r}: this model is quantized already, by {current.method!r}{groups}; "
                "the same or None is accepted"
            )
        return model
    return _replace(model, config, fill=True)


def quantization_of(model: nn.Module) -> QuantizationConfig | None:
    """How a model is quantized; None if it is not."""
    return getattr(model, "quantization", None)


def is_tied(model: nn.Module) -> bool:
    """Whether the output layer's weights are the embedding's."""
    return cast(ModelConfig, model.config).tie_word_embeddings  # nn.Module tells of tensors and modules alone


def skeleton(model: AnyModel, config: QuantizationConfig) -> AnyModel:
    """Replace the layers of a model on the meta device, for a quantized checkpoint to fill."""
    return _replace(model, config, fill=False)


def tie(model: nn.Module) -> None:
    """Make the head share the embedding's codes and scales, if the model's head is tied."""
    if is_tied(model):
        head, embed = model.get_submodule("head"), model.get_submodule("embed")
        assert isinstance(head, Int8Linear)
        assert isinstance(embed, Int8Embedding)
        head.codes, head.scale = embed.codes, embed.scale.view(-1)


def pack_quantized(model: AnyModel) -> AnyModel:
    """Give every quantized layer its fastest kernel, in place, inside wrappers too; the last thing at load.

    With int4 a tied head reads the embedding's codes, which saves memory. With other methods it may get a
    copy of them, in the layout of a faster kernel.
    """
    config = quantization_of(model)
    head_shares_codes = config is not None and config.method == "int4" and is_tied(model)
    for name, layer in model.named_modules():
        if isinstance(layer, QuantizedLinear):
            layer.pack(own_layout=not (head_shares_codes and name.startswith("head")))
    return model


def model_bytes(model: nn.Module) -> int:
    """Bytes of a model's weights in memory, each counted once: parameters, codes, and packed layouts."""
    tensors = {t.data_ptr(): t for t in (*model.parameters(), *model.buffers())}
    packed = sum(layer.own_bytes for layer in model.modules() if isinstance(layer, QuantizedLinear))
    return packed + sum(t.numel() * t.element_size() for t in tensors.values())


def _replace(model: AnyModel, config: QuantizationConfig, fill: bool) -> AnyModel:
    """`quantize` without its checks. `fill`: quantize the weights; else codes and scales are left empty."""
    dtype = next(model.parameters()).dtype

    def make(name: str, linear: nn.Module) -> nn.Module:
        assert isinstance(linear, nn.Linear)  # a model is quantized before it is wrapped or packed
        method = "int8" if config.method == "int4" and name == "head" else config.method
        device, shape = linear.weight.device, (linear.in_features, linear.out_features)
        layer = LINEARS[method](*shape, device, dtype, group_size=config.group_size)
        if fill and name == "head" and is_tied(model):
            layer.bias.zero_()  # its codes are the embedding's (`tie`)
        elif fill:
            layer.set_weight(linear.weight, linear.bias)
        return layer

    replace_linears(model, make)
    tables = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
    for name, table in tables:
        embedding = Int8Embedding(table.num_embeddings, table.embedding_dim, table.weight.device, dtype)
        if fill:
            embedding.set_weight(table.weight)
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, embedding)
    tie(model)
    model.quantization = config  # type: ignore[assignment]  # nn.Module tells of tensors and modules alone
    return model
