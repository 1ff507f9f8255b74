"""Models of the installed library transformers for a config.json: refused, built, and filled. Extension C.

Promises that nothing is downloaded, and that no code of a checkpoint is run: `model_type` chooses a class of
the library, and entries of config.json that name code, kernels or files have no effect. The library is
imported in functions, because it is optional and slow to import. In names, `causal_lm` is the library's model
for text generation: a decoder and an output layer.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine.models.checkpoint import CheckpointError, first_line
from engine.models.transformers_attention import NAME, attention
from engine.models.transformers_survey import NAME as SURVEY_NAME
from engine.models.transformers_survey import survey_attention, survey_mask
from engine.models.weight_files import NamedTensor
from engine.models.weights import refuse_missing
from engine.models.windowed import FULL, SLIDING

# Entries of config.json that would name code to run, kernels to download, or outputs that are not used here.
IGNORED = (
    "auto_map", "attn_implementation", "_attn_implementation", "experts_implementation",
    "_experts_implementation", "fusion_config", "distributed_config", "transformers_weights", "use_kernels",
    "output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "use_return_dict",
)  # fmt: skip
LAYER_TYPES = {FULL, SLIDING}  # that our `attend` can serve


def library_config(raw: dict) -> Any:
    """The library's configuration object for a config.json, given as `raw`.

    Raises CheckpointError if the library is not installed, does not know this model_type, refuses a value, or
    has no decoder of text for it.
    """
    model_type = raw["model_type"]
    try:
        from transformers import CONFIG_MAPPING
    except ModuleNotFoundError:
        raise CheckpointError(
            "the package transformers is missing: pip install 'ruvon[transformers]'"
        ) from None
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        hint = "; the code that comes with a checkpoint (auto_map) is never run" if "auto_map" in raw else ""
        raise CheckpointError(f"transformers {version('transformers')} does not know it{hint}")
    entries = {name: value for name, value in raw.items() if name not in IGNORED}
    with quiet():
        try:
            config = CONFIG_MAPPING[model_type].from_dict(entries)
        except Exception as error:  # the library raises many kinds for a value that it refuses
            raise CheckpointError(f"transformers refuses this model: {first_line(error):.200}") from None
    _refuse_unsupported(config)
    return config


def _refuse_unsupported(config: Any) -> None:
    """Raises CheckpointError if the model is no decoder of text, keeps more than keys and values, or has
    layers of another type than LAYER_TYPES or layers that share their keys.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise CheckpointError("it has an encoder beside its decoder")
    parts = sorted(config.sub_configs)
    if parts:
        raise CheckpointError(f"it is made of several models ({', '.join(parts)})")
    causal_class = _causal_class(config)
    if causal_class is None:
        raise CheckpointError("it generates no text in transformers")
    if getattr(causal_class, "_is_stateful", False):
        raise CheckpointError("it keeps a state beside keys and values (state-space or linear attention)")
    layer_types = getattr(config, "layer_types", None) or ()
    unsupported = sorted(set(layer_types) - LAYER_TYPES)
    if unsupported:
        raise CheckpointError(f"layer_types has {', '.join(map(repr, unsupported))}")
    if getattr(config, "num_kv_shared_layers", 0):
        raise CheckpointError(
            f"num_kv_shared_layers={config.num_kv_shared_layers}: layers that read other layers' keys"
        )


def _causal_class(config: Any) -> Any:
    """The library's class for text generation with this configuration, or None."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    return MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)


def build(config: Any, device: torch.device | str, dtype: torch.dtype, attention_name: str = NAME) -> Any:
    """The library's model of a configuration, without values in its weights. `attention_name`: NAME or
    SURVEY_NAME. Raises CheckpointError if the model cannot be built.
    """
    from transformers.initialization import no_init_weights

    _register()
    causal_class = _causal_class(config)
    with quiet(), no_init_weights(), torch.device(device):
        try:
            causal_lm = causal_class._from_config(config, dtype=dtype, attn_implementation=attention_name)
        except Exception as error:  # the library's code may raise any error
            # Some models have a dictionary of their own attention classes, in which our name is no key.
            if isinstance(error, KeyError) and error.args == (attention_name,):
                raise CheckpointError("its attention is chosen from a list of its own") from None
            raise CheckpointError(
                f"{causal_class.__name__} cannot be built: {type(error).__name__}: {first_line(error):.200}"
            ) from None
    causal_lm.tie_weights()
    return causal_lm.eval().requires_grad_(False)


def fill(config: Any, dtype: torch.dtype, tensors: list[NamedTensor], folder: Path) -> Any:
    """The library's model on the CPU, filled with the `tensors` of the checkpoint in `folder`. The library
    renames and joins tensors as its model needs them. A weight may be the checkpoint's tensor itself.

    Raises CheckpointError, which names a tensor, if one is missing, has no place or the wrong shape, and with
    the library's message if the library cannot read the weights.
    """
    _register()
    with quiet():
        try:
            causal_lm, report = _causal_class(config).from_pretrained(
                None,
                config=config,
                state_dict={name: tensor for _, name, tensor in tensors},
                dtype=dtype,
                attn_implementation=NAME,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # `_refuse_incomplete` refuses them by name
            )
        except Exception as error:  # the library's code may raise any error
            raise CheckpointError(
                f"{folder}: transformers cannot read the weights: {first_line(error):.300}"
            ) from None
    _refuse_incomplete(report, {name: file for file, name, _ in tensors}, folder)
    return causal_lm.eval().requires_grad_(False)


def _refuse_incomplete(report: dict[str, Any], files: dict[str, Path], folder: Path) -> None:
    """Raises CheckpointError if the library's report of a load has a tensor of another shape, one that is
    missing or has no place, or an error. `files`: each tensor's file, by the tensor's name.
    """
    mismatched = sorted(report["mismatched_keys"])
    if mismatched:
        name, shape, needed = mismatched[0]
        raise CheckpointError(
            f"{folder}: tensor {name!r} has shape {tuple(shape)}, the model needs {tuple(needed)}"
        )
    refuse_missing(str(folder), report["missing_keys"])
    unexpected = sorted(report["unexpected_keys"])
    if unexpected:
        file = files.get(unexpected[0], folder)
        raise CheckpointError(f"{file}: tensor {unexpected[0]!r} has no place in this model")
    errors = report.get("error_msgs")
    if errors:
        raise CheckpointError(f"{folder}: transformers cannot read the weights: {str(errors)[:300]}")


def decoder_of(causal_lm: Any) -> nn.Module:
    """The part of the library's model that computes hidden states from token ids. Raises CheckpointError if
    the model has no such part.
    """
    decoder = causal_lm.get_decoder()
    if decoder is None or decoder is causal_lm:
        raise CheckpointError(f"{type(causal_lm).__name__} is not made of a decoder and an output layer")
    return decoder


def _register() -> None:
    """Add our attention functions to those of the library, by name."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionInterface.register(SURVEY_NAME, survey_attention)
    AttentionMaskInterface.register(SURVEY_NAME, survey_mask)


@contextmanager
def quiet() -> Iterator[None]:
    """Inside this context, the library prints no warnings and no progress bars. What matters in them is
    raised as an error.
    """
    from transformers.utils import logging as library_logging

    level, has_bar = library_logging.get_verbosity(), library_logging.is_progress_bar_enabled()
    library_logging.set_verbosity(logging.CRITICAL)
    if has_bar:
        library_logging.disable_progress_bar()
    try:
        yield
    finally:
        library_logging.set_verbosity(level)
        if has_bar:
            library_logging.enable_progress_bar()
