"""Which generation_config.json counts: the model's, another folder's, or none. Part 20's wiring.

The file recommends sampling parameters, which `LLM` and `ruvon serve` both take for a request that gives
none. It also names the tokens that end a text.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.decoding.recommended import recommended_params
from engine.models.checkpoint import read_json, resolve
from engine.models.config import ModelConfig, eos_token_ids
from engine.wiring.engine_args import MODELS_OWN, VLLMS_OWN, EngineArgs


def recommended(args: EngineArgs) -> dict[str, Any]:
    """name -> value of the sampling parameters that `args.generation_config` recommends; {} for "vllm", and
    for a model without the file. Raises ParameterError for a value out of range, CheckpointError if the file
    cannot be read.
    """
    if args.generation_config == VLLMS_OWN:
        return {}
    is_models_own = args.generation_config == MODELS_OWN
    path = resolve(args.model if is_models_own else args.generation_config) / "generation_config.json"
    return recommended_params(read_json(path)) if path.exists() else {}


def described(args: EngineArgs) -> str:
    """A line for the start of a server: which defaults a request has that gives no sampling parameters."""
    values = recommended(args)
    if not values:
        return "Sampling defaults: vLLM's own, temperature=1.0; generation_config.json gives no others"
    listed = ", ".join(f"{name}={value}" for name, value in values.items())
    bound = " (which also bounds what a request asks for)" if "max_tokens" in values else ""
    return f"Sampling defaults, from generation_config.json: {listed}{bound}"


def with_its_eos(config: ModelConfig, args: EngineArgs) -> ModelConfig:
    """`config`, with the tokens that end a text according to the folder `args.generation_config`, if it is
    one. Raises CheckpointError if the file cannot be read.
    """
    if args.generation_config in (MODELS_OWN, VLLMS_OWN):
        return config  # which has the model's own
    folder = Path(args.generation_config)
    return replace(config, eos_token_ids=eos_token_ids(folder, config.raw))
