"""Reads the generation_config.json that `EngineArgs.generation_config` selects. Part 20's wiring.

It is the model's file, another folder's, or none. The file recommends sampling parameters: `LLM` uses them
for a prompt without SamplingParams, and `ruvon serve` uses each for a request that does not give it. The file
also names the tokens that end a text.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.decoding.recommended import recommended_params
from engine.models.checkpoint import read_json, resolve
from engine.models.config import ModelConfig, eos_token_ids
from engine.wiring.engine_args import FROM_MODEL, FROM_VLLM, EngineArgs


def recommended_values(args: EngineArgs) -> dict[str, Any]:
    """name -> value of the sampling parameters that `args.generation_config` recommends; {} for "vllm", and
    for a model without the file. Raises ParameterError for a value out of range, CheckpointError if the file
    cannot be read.
    """
    if args.generation_config == FROM_VLLM:
        return {}
    source = args.model if args.generation_config == FROM_MODEL else args.generation_config
    path = resolve(source) / "generation_config.json"
    if not path.exists():
        return {}
    return recommended_params(read_json(path))


def defaults_line(args: EngineArgs) -> str:
    """A line that a server prints at its start: the defaults of a request that gives no sampling parameters.
    Raises as `recommended_values` does.
    """
    values = recommended_values(args)
    if not values:
        return "Sampling defaults: vLLM's own, temperature=1.0; generation_config.json gives no others"
    listed = ", ".join(f"{name}={value}" for name, value in values.items())
    bound = " (which also bounds what a request asks for)" if "max_tokens" in values else ""
    return f"Sampling defaults, from generation_config.json: {listed}{bound}"


def with_eos_tokens(config: ModelConfig, args: EngineArgs) -> ModelConfig:
    """The config with the tokens that end a text. If `args.generation_config` is a folder, they come from its
    file; otherwise the config has the model's already. Raises CheckpointError if the file cannot be read.
    """
    if args.generation_config in (FROM_MODEL, FROM_VLLM):
        return config
    folder = Path(args.generation_config)
    return replace(config, eos_token_ids=eos_token_ids(folder, config.raw))
