"""Any decoder that the library transformers knows, with Hugging Face's own modelling code. Extension C.

`architecture` (config.py) comes here for a model_type without a file of ours, or if model_impl asks for it.
Promises Hugging Face's numbers on our flat token axis: their code computes everything but attention, which
goes to the `attend` that is handed in (transformers_attention.py). A model that this cannot serve is refused
before its weights are read (transformers_survey.py). Never runs code that comes with a checkpoint.
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
from engine.models.transformers_attention import Step
from engine.models.transformers_library import build, decoder_of, fill, library_config
from engine.models.transformers_ranks import Part, build_part, cut, entries, leaf, refuse_undivided
from engine.models.weights import Module, Place, refuse_not_finite

__all__ = ["PREFIX", "REDUNDANT", "Model", "config_from", "load_weights", "places"]

PREFIX = ""  # the names of tensors are Hugging Face's, whole
REDUNDANT = r"(?!)"  # matches nothing: transformers knows by itself which tensors it does not need
MAX_LAYERS = 1000  # far above any model; the trial pass is made of all layers
# Names in config.json of settings that ModelConfig has, and that nothing reads here.
INNER_NAMES = ("intermediate_size", "ffn_dim", "n_inner")
EPS_NAMES = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
ACTIVATION_NAMES = ("hidden_act", "hidden_activation", "activation_function")
# Rotary scalings that change every frequency of a step once its longest sequence is longer than in training.
BY_LENGTH = ("dynamic", "longrope")


SUPPORTED = (
    "with the package transformers every decoder of text in which each layer attends once, through its "
    "attention interface, to all tokens before or to a window of them"
)


@dataclass(frozen=True)
class TransformersConfig(ModelConfig):
    """A ModelConfig with what the survey found."""

    windows: tuple[int | None, ...] = ()  # [L]: how many tokens each layer sees; None: all
    ranks: int = 1  # that share the model: its linear layers are one rank's part (Extension A)


def config_from(raw: dict) -> TransformersConfig:
    """Translate any model's config.json, given as `raw`. The sizes of keys and values are those that a trial
    pass of the model shows.

    Raises CheckpointError if transformers is not installed or does not know the model, or with the reason why
    it cannot run here, and what is supported.
    """
    try:
        return _surveyed(json.dumps(raw))
    except CheckpointError as error:
        raise CheckpointError(
            f"model_type {raw['model_type']!r:.80} ({error}) is not supported; supported: "
            f"{', '.join(architectures())}, and {SUPPORTED}"
        ) from None


@lru_cache(maxsize=8)  # a command reads the same config.json several times
def _surveyed(text: str) -> TransformersConfig:
    """`config_from` for the text of a config.json."""
    raw = json.loads(text)
    theirs = library_config(raw)
    num_layers = getattr(theirs, "num_hidden_layers", None)
    if type(num_layers) is not int or not 1 <= num_layers <= MAX_LAYERS:
        raise CheckpointError(f"num_hidden_layers={num_layers!r:.40}: 1 to {MAX_LAYERS:,} is accepted")
    # The meta device has the products of experts' weights in bfloat16 alone.
    causal = build(theirs, "meta", torch.bfloat16, transformers_survey.NAME)
    calls = transformers_survey.survey(decoder_of(causal), num_layers)
    vocab_size, hidden_size = causal.get_output_embeddings().weight.shape
    dtype = raw.get("dtype") or raw.get("torch_dtype")
    windows = tuple(call.window for call in calls)
    finite = [window for window in windows if window is not None]
    config = TransformersConfig(
        model_type=raw["model_type"],
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=calls[0].num_heads,
        num_kv_heads=calls[0].num_kv_heads,
        head_dim=calls[0].head_dim,
        intermediate_size=_setting(theirs, INNER_NAMES, 4 * hidden_size),
        max_positions=_max_positions(theirs),
        norm_eps=_setting(theirs, EPS_NAMES, 0.0),
        activation=_setting(theirs, ACTIVATION_NAMES, ""),
        tie_word_embeddings=False,  # transformers shares the weight by itself, and nobody else needs to know
        dtype=dtype if isinstance(dtype, str) else None,
        raw=raw,
        model_impl=TRANSFORMERS,
        windows=windows,
        window=max(finite) if len(finite) == num_layers else None,
        attention_extras=any(call.needs_extras for call in calls),
    )
    transformers_survey.survey_logits(Model(config, "meta", torch.bfloat16, causal).logits, config)
    return config


def for_ranks(config: TransformersConfig, size: int) -> TransformersConfig:
    """The config for a model that `size` ranks share. Whoever cuts the model divides its sizes.

    Raises CheckpointError with the reason why the model cannot be shared.
    """
    refuse_undivided(config, size)
    return replace(config, ranks=size)


def _setting(theirs: Any, names: tuple[str, ...], default: Any) -> Any:
    """The first of these settings that a configuration of the library has."""
    return next((value for name in names if (value := getattr(theirs, name, None)) is not None), default)


def _max_positions(theirs: Any) -> int:
    """The longest sequence that a model may see: with a rotary scaling of BY_LENGTH, what it saw in training,
    because beyond, a sequence would change the numbers of those that share a step with it.
    """
    longest = getattr(theirs, "max_position_embeddings", None)
    if longest is None:
        raise CheckpointError("max_position_embeddings is missing: the longest sequence is not known")
    scaling = getattr(theirs, "rope_parameters", None) or {}
    per_layer_type = [value for value in scaling.values() if isinstance(value, dict)] or [scaling]
    for settings in per_layer_type:
        if settings.get("rope_type") in BY_LENGTH:
            longest = min(longest, settings.get("original_max_position_embeddings") or longest)
    return longest


class Model(LanguageModel):
    """A model of transformers, seen as a `LanguageModel`. The weights are without values until they are
    filled.

    Its linear layers are found by `replace_linears` as in our own models: `head`, and `body.…` with Hugging
    Face's names.
    """

    config: TransformersConfig
    head: nn.Module

    def __init__(
        self,
        config: TransformersConfig,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        causal: Any = None,
    ) -> None:
        """`causal` is the library's model, if it is built already. It is changed."""
        super().__init__()
        if causal is None:
            causal = build_part(library_config(config.raw), config.ranks, device, dtype)
        self.config = config
        body, self.head = decoder_of(causal), causal.get_output_embeddings()
        self.step = Step(config.windows)
        self.step.attach(body)
        # What is left of the library's model leads from hidden states to logits: caps and scales are applied.
        _put(causal, body, Given())
        _put(causal, self.head, Through(self))
        self.__dict__["outer"] = causal  # no module of this model: its two parts are
        plan = entries(causal.config, body)
        for name, module in list(body.named_modules()):
            if type(module) is nn.Linear:
                body.set_submodule(name, Flat(module, leaf(plan.get(name))))
            elif isinstance(module, nn.Linear):  # a router that also chooses: no plain layer replaces it
                del module.in_features, module.out_features  # by these, `replace_linears` knows a layer
        self.body = body

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """token_ids[T], positions[T] -> hidden[T, D], after the last norm: the input of `logits`.

        Raises ValueError for a token id past the vocabulary, on a CPU.
        """
        self.step.attend = attend
        try:
            out = self.body(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        except IndexError:
            if int(token_ids.max()) < self.config.vocab_size:
                raise
            raise ValueError(
                f"token id {int(token_ids.max())} is out of range: this model has token ids 0 to "
                f"{self.config.vocab_size - 1}"
            ) from None
        finally:
            self.step.attend = None
        return out.last_hidden_state[0]  # [T, D]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden[R, D] -> logits[R, V], the way that the library's model does it."""
        outer = self.__dict__["outer"]
        return outer(inputs_embeds=hidden[None], use_cache=False).logits[0]  # [R, V]


def _put(outer: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put `new` in place of `old`, a module somewhere inside `outer`."""
    name = next(name for name, module in outer.named_modules() if module is old)
    outer.set_submodule(name, new)


class Hidden(tuple):
    """A decoder's result in the library's form: hidden states, and None for whatever else may be in one."""

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None


class Given(nn.Module):
    """Stands in the library's model for the decoder: its result is what it is given."""

    def forward(self, *inputs: Any, inputs_embeds: Tensor, **options: Any) -> Hidden:
        """inputs_embeds[1, R, D]"""
        return Hidden((inputs_embeds,))


class Through(nn.Module):
    """Stands in the library's model for the output layer: calls the `head` that the model has by now."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.__dict__["model"] = model  # no module of this one: a circle

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden[1, R, D] -> [1, R, V]"""
        return self.__dict__["model"].head(hidden[0])[None]


class Flat(Module):
    """Calls a linear layer with rows on one axis: x[..., in] -> [..., out]. Layers that replace linear ones
    (packed, quantized, with adapters) take x[T, in].
    """

    def __init__(self, linear: nn.Linear, name: str) -> None:
        """`name`: the layer's in this module. It tells ranks how the layer is cut (transformers_ranks.py)."""
        super().__init__()
        self.name = name
        self.add_module(name, linear)

    @property
    def weight(self) -> Tensor:
        """Some code of the library asks for its dtype or device."""
        return self._modules[self.name].weight  # type: ignore[union-attr, return-value]

    def forward(self, x: Tensor) -> Tensor:
        return self._modules[self.name](x.flatten(0, -2)).unflatten(0, x.shape[:-1])  # type: ignore[misc]


def places(config: TransformersConfig) -> dict[str, Place]:
    """Hugging Face's names of the linear layers' weights, and their places in `Model`: what an adapter may
    change. Weights themselves are filled by transformers (`load_weights`).
    """
    causal = build(library_config(config.raw), "meta", torch.bfloat16)
    body = decoder_of(causal)
    prefix = next(name for name, module in causal.named_modules() if module is body)
    plan = entries(causal.config, body)
    return {
        f"{prefix}.{name}.weight": Place(f"body.{name}.{leaf(plan.get(name))}.weight")
        for name, module in body.named_modules()
        if type(module) is nn.Linear
    }


def num_weights(config: TransformersConfig) -> int:
    """The number of weights, counted on the meta device."""
    causal = build_part(library_config(config.raw), config.ranks, "meta", torch.bfloat16)
    return sum(parameter.numel() for parameter in causal.parameters())


def load_weights(
    folder: Path,
    config: TransformersConfig,
    dtype: torch.dtype,
    device: torch.device,
    tensors: list[tuple[Path, str, Tensor]],
    part: Part | None = None,
) -> Model:
    """The model, filled with the tensors of a checkpoint, and tried. With `part`, one rank's part of it.

    Raises CheckpointError, which names a tensor, if one is missing, has no place or the wrong shape, or holds
    a number that is not finite; and if sequences in one step change each other.
    """
    causal = fill(library_config(config.raw), dtype, tensors, folder)
    if part is not None:
        cut(causal, config.ranks, part)
    for parameter in causal.parameters():  # else the file's own pages would be the weights
        parameter.data = parameter.data.clone()
    causal = causal.to(device)
    for name, parameter in causal.named_parameters():
        refuse_not_finite(str(folder), name, parameter)
    model = Model(config, device, dtype, causal)
    try:
        transformers_survey.refuse_leaks(model)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    return model
