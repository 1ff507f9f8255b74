"""Any decoder that the library transformers knows, with Hugging Face's own modelling code. Extension C.

`architecture` (config.py) comes here for a model_type without a file of ours, or if model_impl asks for it.
Promises Hugging Face's numbers on our flat token axis: their code computes everything but attention, which
goes to the `attend` that is handed in (transformers_attention.py). Trial passes refuse models that cannot run
so (transformers_survey.py). Never runs code that comes with a checkpoint.
"""

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine.attention.interface import Attend
from engine.models import transformers_survey
from engine.models.checkpoint import CheckpointError
from engine.models.config import TRANSFORMERS, ModelConfig, architectures
from engine.models.language_model import LanguageModel
from engine.models.transformers_attention import StepContext, attach
from engine.models.transformers_library import build, decoder_of, fill, library_config
from engine.models.transformers_modules import (
    CurrentHead,
    FlatLinear,
    PassThrough,
    name_in,
    replace_module,
)
from engine.models.transformers_ranks import (
    ShardTensor,
    build_part,
    keep_part,
    linear_name,
    plan_entries,
    refuse_undivided,
)
from engine.models.weight_files import NamedTensor
from engine.models.weights import Place, refuse_not_finite
from engine.models.windowed import largest_window

PREFIX = ""  # the names of tensors are Hugging Face's, whole
REDUNDANT = r"(?!)"  # matches nothing: transformers knows by itself which tensors it does not need
MAX_LAYERS = 1000  # far above any model: the trial pass makes all layers
# The names that config.json may have for fields of ModelConfig. Nothing here computes with these fields.
INNER_NAMES = ("intermediate_size", "ffn_dim", "n_inner")
EPS_NAMES = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
ACTIVATION_NAMES = ("hidden_act", "hidden_activation", "activation_function")
# Rotary scalings that change every frequency of a step if its longest sequence is longer than in training.
SCALED_BY_LENGTH = ("dynamic", "longrope")
SUPPORTED = (
    "with the package transformers every decoder of text in which each layer attends once, through its "
    "attention interface, to all tokens before or to a window of them"
)


@dataclass(frozen=True)
class TransformersConfig(ModelConfig):
    """A ModelConfig with the windows that the trial pass has shown, and the number of ranks."""

    windows: tuple[int | None, ...] = ()  # [L]: how many tokens each layer sees; None: all
    ranks: int = 1  # how many ranks share the model, whose linear layers are then one rank's (Extension A)


def config_from(raw: dict) -> TransformersConfig:
    """Translate any model's config.json, given as `raw`. The sizes of keys and values are those that a trial
    pass of the model shows.

    Raises CheckpointError if transformers is not installed or does not know the model, or if the model cannot
    run here. The message has the reason, and what is supported.
    """
    try:
        return _config_from_text(json.dumps(raw))
    except CheckpointError as error:
        raise CheckpointError(
            f"model_type {raw['model_type']!r:.80} ({error}) is not supported; supported: "
            f"{', '.join(architectures())}, and {SUPPORTED}"
        ) from None


@lru_cache(maxsize=8)  # a command reads the same config.json several times; a dict could not be the key
def _config_from_text(text: str) -> TransformersConfig:
    """`config_from` for the text of a config.json."""
    raw = json.loads(text)
    hf_config = library_config(raw)
    num_layers = _num_layers(hf_config)
    # On the meta device, PyTorch multiplies the weights of experts in bfloat16 only.
    causal_lm = build(hf_config, "meta", torch.bfloat16, transformers_survey.NAME)
    calls = transformers_survey.survey(decoder_of(causal_lm), num_layers)
    config = _translate(raw, hf_config, causal_lm, calls)
    model = Model(config, "meta", torch.bfloat16, causal_lm)
    transformers_survey.refuse_other_logits(model)
    return config


def _num_layers(hf_config: Any) -> int:
    """The number of layers. Raises CheckpointError if it is missing or too large."""
    num_layers = getattr(hf_config, "num_hidden_layers", None)
    if type(num_layers) is not int or not 1 <= num_layers <= MAX_LAYERS:
        raise CheckpointError(f"num_hidden_layers={num_layers!r:.40}: 1 to {MAX_LAYERS:,} is accepted")
    return num_layers


def _translate(
    raw: dict, hf_config: Any, causal_lm: Any, calls: list[transformers_survey.AttentionCall]
) -> TransformersConfig:
    """Our config. `raw` is the content of config.json, and `hf_config` the library's configuration, made from
    it. `causal_lm` is the library's model, and calls[L] what its layers hand to their attention.
    """
    vocab_size, hidden_size = causal_lm.get_output_embeddings().weight.shape
    dtype = raw.get("dtype") or raw.get("torch_dtype")
    windows = tuple(call.window for call in calls)
    return TransformersConfig(
        model_type=raw["model_type"],
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=len(calls),
        num_heads=calls[0].num_heads,
        num_kv_heads=calls[0].num_kv_heads,
        head_dim=calls[0].head_dim,
        intermediate_size=_setting(hf_config, INNER_NAMES, 4 * hidden_size),
        max_positions=_max_positions(hf_config),
        norm_eps=_setting(hf_config, EPS_NAMES, 0.0),
        activation=_setting(hf_config, ACTIVATION_NAMES, ""),
        tie_word_embeddings=False,  # transformers shares the weight by itself, and no code here needs to know
        dtype=dtype if isinstance(dtype, str) else None,
        raw=raw,
        model_impl=TRANSFORMERS,
        windows=windows,
        window=largest_window(windows),
        attention_extras=any(call.needs_extras for call in calls),
    )


def for_ranks(config: TransformersConfig, size: int) -> TransformersConfig:
    """The config for a model that `size` ranks share. Its sizes stay those of the whole model: the caller
    divides them (`Sharding.config`).

    Raises CheckpointError with the reason why the model cannot be shared.
    """
    refuse_undivided(config, size)
    return replace(config, ranks=size)


def _setting(hf_config: Any, names: tuple[str, ...], default: Any) -> Any:
    """The first of these settings that the library's configuration has; `default` if it has none."""
    for name in names:
        value = getattr(hf_config, name, None)
        if value is not None:
            return value
    return default


def _max_positions(hf_config: Any) -> int:
    """The longest sequence that a model may see.

    With a rotary scaling in SCALED_BY_LENGTH, this is the longest sequence of its training. A longer one
    would change the numbers of all sequences that share a step with it. Raises CheckpointError if the
    configuration does not say.
    """
    longest = getattr(hf_config, "max_position_embeddings", None)
    if longest is None:
        raise CheckpointError("max_position_embeddings is missing: the longest sequence is not known")
    rope_parameters = getattr(hf_config, "rope_parameters", None) or {}
    # The library has one set of parameters, or one for each type of layer.
    by_layer_type = [value for value in rope_parameters.values() if isinstance(value, dict)]
    for settings in by_layer_type or [rope_parameters]:
        trained = settings.get("original_max_position_embeddings")
        if trained and settings.get("rope_type") in SCALED_BY_LENGTH:
            longest = min(longest, trained)
    return longest


class Model(LanguageModel):
    """A model of transformers with the interface of `LanguageModel`. The parameters are uninitialised until
    they are filled.

    `replace_linears` finds its linear layers as in our own models: `head`, and `body.…` with Hugging Face's
    names.
    """

    config: TransformersConfig
    causal_lm: Any  # what is left of the library's model: it leads from hidden states to logits

    def __init__(
        self,
        config: TransformersConfig,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        causal_lm: Any = None,
    ) -> None:
        """`causal_lm`: the library's model, which is changed; None: build it."""
        super().__init__()
        if causal_lm is None:
            causal_lm = build_part(library_config(config.raw), config.ranks, device, dtype)
        self.config = config
        # 1. Take the library's model apart, into the decoder and the output layer. The library's own caps and
        #    scales of logits are applied in what is left of it.
        body, self.head = decoder_of(causal_lm), causal_lm.get_output_embeddings()
        replace_module(causal_lm, body, PassThrough())
        replace_module(causal_lm, self.head, CurrentHead(self))
        # In `__dict__`, so that it does not become a module of this model: its two parts are modules already.
        self.__dict__["causal_lm"] = causal_lm
        # 2. Let the layers find the `attend` of a step.
        self.step = StepContext(config.windows)
        attach(body, self.step)
        # 3. Wrap the linear layers, so that layers that replace them get rows on one axis.
        plan = plan_entries(causal_lm.config, body)
        for name, module in list(body.named_modules()):
            if type(module) is nn.Linear:
                body.set_submodule(name, FlatLinear(module, linear_name(plan.get(name))))
            elif isinstance(module, nn.Linear):
                # A subclass computes more than a linear layer, such as a router that also chooses experts.
                # Without these attributes, `replace_linears` does not take it for a linear layer.
                del module.in_features, module.out_features
        self.body = body

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """token_ids[T], positions[T] -> hidden[T, D], after the last norm: the input of `logits`.

        Raises ValueError for a token id outside the vocabulary. On a GPU the caller must check the ids.
        """
        self.step.attend = attend
        try:
            out = self.body(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        except IndexError:
            vocab_size = self.config.vocab_size
            outside = [id for id in token_ids.tolist() if not 0 <= id < vocab_size]
            if not outside:
                raise
            raise ValueError(
                f"token id {outside[0]} is out of range: this model has token ids 0 to {vocab_size - 1}"
            ) from None
        finally:
            self.step.attend = None
        return out.last_hidden_state[0]  # [T, D]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden[R, D] -> logits[R, V], as the library's model computes them."""
        return self.causal_lm(inputs_embeds=hidden[None], use_cache=False).logits[0]  # [R, V]


def places(config: TransformersConfig) -> dict[str, Place]:
    """Hugging Face's names of the linear layers' weights, and their places in `Model`, for adapters (Part
    18). A checkpoint's weights are put in place by transformers (`load_weights`).
    """
    causal_lm = build(library_config(config.raw), "meta", torch.bfloat16)
    body = decoder_of(causal_lm)
    prefix = name_in(causal_lm, body)
    plan = plan_entries(causal_lm.config, body)
    return {
        f"{prefix}.{name}.weight": Place(f"body.{name}.{linear_name(plan.get(name))}.weight")
        for name, module in body.named_modules()
        if type(module) is nn.Linear
    }


def num_weights(config: TransformersConfig) -> int:
    """The number of weights, or of one rank's, counted on the meta device, which takes no memory."""
    causal_lm = build_part(library_config(config.raw), config.ranks, "meta", torch.bfloat16)
    return sum(parameter.numel() for parameter in causal_lm.parameters())


def load_weights(
    folder: Path,
    config: TransformersConfig,
    dtype: torch.dtype,
    device: torch.device,
    tensors: list[NamedTensor],
    shard: ShardTensor | None = None,
) -> Model:
    """The model, filled with the `tensors` of a checkpoint, and tried once. With `shard`, one rank's part of
    it.

    Raises CheckpointError, which names a tensor, if one is missing, has no place or the wrong shape, or holds
    a number that is not finite. Also raises CheckpointError if sequences in one step change each other.
    """
    causal_lm = fill(library_config(config.raw), dtype, tensors, folder)
    if shard is not None:
        keep_part(causal_lm, config.ranks, shard)
    # A parameter may be a view of the file, mapped into memory: a file that is overwritten later would change
    # it, and one that is cut short would end this process. So each is copied.
    for parameter in causal_lm.parameters():
        parameter.data = parameter.data.clone()
    causal_lm = causal_lm.to(device)
    for name, parameter in causal_lm.named_parameters():
        refuse_not_finite(str(folder), name, parameter)
    model = Model(config, device, dtype, causal_lm)
    try:
        transformers_survey.refuse_leaks(model)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    return model
