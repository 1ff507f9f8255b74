"""`EngineArgs`: the names, help texts and checks of an engine's options. Part 20.

The names are vLLM's. `LLM(...)` takes the options as keywords. The commands of `ruvon` take them as flags,
which engine/cli/engine_flags.py makes from this class: a field added here becomes a flag with its help. This
module checks only what can be checked without a model; what builds the engine (compose.py) checks the rest.
The module imports no torch, so that `--help` answers at once.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

from engine.decoding.params import refuse_unknown_names
from engine.models.checkpoint import embedded_models
from engine.models.known_shapes import TOKENIZER, shape_folder
from engine.speculation.config import SpeculativeConfig
from engine.wiring.extensions import EXTENSIONS, is_here
from engine.wiring.neutral_options import NEUTRAL, take_neutral_options

if TYPE_CHECKING:
    from engine.core.llm_engine import LLMEngine

MODEL, REQUESTS, MEMORY, SPEED = "Model", "Requests", "Keys and values", "Speed"  # topics of the help
ADAPTERS, WATCHING = "Adapters", "What it does, seen from outside"
FROM_MODEL, FROM_VLLM = "auto", "vllm"  # values of generation_config that are no folder
Device = Any  # a name such as cuda:0, or a torch.device
DType = Any  # a name such as float16, or a torch.dtype
SHORT_DTYPES = {"half": "float16", "float": "float32"}  # other names that vLLM takes


def _option(
    default: Any,
    topic: str,
    help: str,
    example: str | None = None,
    completions: Sequence[str] = (),
    extension: str | None = None,
) -> Any:
    """A dataclass field with the metadata of its flag.

    `topic` is the heading in `--help` under which the flag stands. `example` is a value as one types it on
    the command line. `completions` are values that a shell offers, which need not be all that are accepted.
    `extension` is the letter of the extension that brings the field: without it, only `default` is accepted.
    """
    metadata = {
        "topic": topic,
        "help": help,
        "example": example,
        "completions": completions,
        "extension": extension,
    }
    return field(default=default, metadata=metadata)


@take_neutral_options
@refuse_unknown_names
@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """The options of an engine. Each field's text below is its help.

    None leaves an option off, or stands for the default that the option's help names; so does "auto". vLLM's
    options that are no fields are accepted with a value that asks for nothing (neutral_options.py). Raises
    TypeError for an unknown field, and ValueError, with the field's name, if a value is refused.
    """

    model: str | Path = _option(
        "storyteller",
        MODEL,
        f"Embedded ({', '.join(embedded_models())}), a folder, or a hub id.",
        completions=embedded_models(),
    )
    tokenizer: str | Path | None = _option(
        None, MODEL, "A model or folder with another tokenizer; default: the model's own."
    )
    device: Device = _option(
        "auto",
        MODEL,
        "auto (a CUDA GPU, if there is one), cpu, cuda, cuda:1, …",
        completions=("auto", "cpu", "cuda"),
    )
    dtype: DType = _option(
        "auto",
        MODEL,
        "auto, float32, float16 or bfloat16.",
        completions=("auto", "float32", "float16", "bfloat16"),
    )
    load_format: str = _option(
        "auto",
        MODEL,
        "auto, safetensors, pt, or dummy: random weights (qwen3-0.6b and others as well).",
        completions=("auto", "safetensors", "pt", "dummy"),
    )
    model_impl: Literal["auto", "ruvon", "transformers"] = _option(
        "auto",
        MODEL,
        "whose code computes the model: auto is ruvon's where it has a file, else Hugging Face's, eager.",
        extension="C",
    )
    quantization: Literal["int8", "int4", "int8_dynamic"] | None = _option(
        None, MODEL, "weights as whole numbers; int8_dynamic: activations, too; default: as the model is."
    )
    tensor_parallel_size: int = _option(
        1, MODEL, "Devices that share the model, each with a piece of every layer.", extension="A"
    )

    max_model_len: int | None = _option(
        None, REQUESTS, "Longest prompt plus output, in tokens; default: what the model sees."
    )
    generation_config: str | Path = _option(
        FROM_MODEL,
        REQUESTS,
        "Sampling defaults: auto (the model's generation_config.json), vllm (none), or that file's folder.",
        completions=(FROM_MODEL, FROM_VLLM),
    )
    max_num_seqs: int | None = _option(None, REQUESTS, "Requests running at once; default: 16, on a GPU 256.")
    max_num_batched_tokens: int | None = _option(
        None, REQUESTS, "Tokens in one step; default: 512, on a GPU 8192."
    )
    structured_outputs_config: Mapping[str, Any] | None = _option(
        None, REQUESTS, "Who compiles what outputs must fit: backend (auto, guidance, ruvon), and more.",
        '{"backend": "guidance", "disable_any_whitespace": true}', extension="B",
    )  # fmt: skip
    seed: int | None = _option(
        None,
        REQUESTS,
        "Makes the seeds of requests that have none, and ruvon bench's prompts: the same run twice.",
    )

    kv_cache: Literal["paged", "slots"] = _option(
        "paged", MEMORY, "in blocks, or in slots of --max-model-len tokens, one for each running request."
    )
    gpu_memory_utilization: float | None = _option(
        None,
        MEMORY,
        "Share of a GPU's memory for model, keys and values; of a CPU's free memory, for keys and values.",
    )
    kv_cache_memory_bytes: int | None = _option(
        None, MEMORY, "Bytes for keys and values, in place of a share; default: half of what is free."
    )
    block_size: int | None = _option(None, MEMORY, "Tokens in a block of pages; default: 16.")
    enable_prefix_caching: bool | None = _option(
        None, MEMORY, "Compute the beginning of a prompt once; default: with pages."
    )
    swap_space: float = _option(0, MEMORY, "GiB of CPU memory for preempted requests.")
    preemption_mode: Literal["recompute", "swap"] | None = _option(
        None, MEMORY, "what becomes of a preempted request; default: what is long is swapped, if it fits."
    )

    attention: Literal["auto", "eager", "tiled", "sdpa", "triton"] = _option(
        "auto", SPEED, "how attention is computed; auto is triton on a GPU, sdpa on a CPU."
    )
    enforce_eager: bool = _option(False, SPEED, "Launch each kernel by itself: no CUDA graphs.")
    async_scheduling: bool | None = _option(
        None, SPEED, "Launch a step before the last one's tokens are read; default: on a GPU."
    )
    speculative_config: Mapping[str, Any] | None = _option(
        None, SPEED, "Propose tokens and verify them: SpeculativeConfig's fields, with a model or a method.",
        '{"model": "storyteller-draft", "num_speculative_tokens": 4}',
    )  # fmt: skip
    record: str | Path | None = _option(
        None, SPEED, "A file that gets every step, to be run again by ruvon replay: prompts are in it."
    )

    trace: str | Path | None = _option(
        None, WATCHING, "A file that gets the times of each step and request: for Perfetto and ruvon trace."
    )
    otlp_traces_endpoint: str | None = _option(
        None, WATCHING, "Where a span of each request is sent, by OTLP over HTTP; needs the extra otel.",
        "http://localhost:4318/v1/traces",
    )  # fmt: skip

    enable_lora: bool = _option(False, ADAPTERS, "Requests may name LoRA adapters.")
    max_loras: int = _option(4, ADAPTERS, "Adapters that may share a step: requests for others wait.")
    max_lora_rank: int = _option(16, ADAPTERS, "The highest rank of an adapter.")

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag for each field to `parser`, and one for each of NEUTRAL. Returns `parser`."""
        from engine.wiring.argparse_flags import add_flags

        return add_flags(parser, fields(EngineArgs))

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> "EngineArgs":
        """The options in what a parser with `add_cli_args` has read, which may hold other values as well."""
        names = {spec.name for spec in fields(cls)} | NEUTRAL.keys()
        return cls(**{name: value for name, value in vars(args).items() if name in names})

    def build_engine(self) -> "LLMEngine":
        """Load the model and build the engine, for `LLMEngine.from_engine_args`. Raises as `LLM` does."""
        from engine.wiring.compose import build_engine, load_adapters_on_demand

        engine = build_engine(self)
        load_adapters_on_demand(engine)
        return engine

    def __post_init__(self) -> None:
        if isinstance(self.dtype, str):
            object.__setattr__(self, "dtype", SHORT_DTYPES.get(self.dtype, self.dtype))
        if self.load_format == "dummy":
            folder = shape_folder(self.model)
            if folder is not None:  # the model is one of those shapes that need no download
                object.__setattr__(self, "model", folder)
                object.__setattr__(self, "tokenizer", self.tokenizer or TOKENIZER)
        self._check_values()
        self._check_combinations()

    def _check_values(self) -> None:
        """Check each field by itself. Raises ValueError."""
        for spec in fields(self):
            _check_value(spec, getattr(self, spec.name))
        for name in ("model", "tokenizer"):
            value = getattr(self, name)
            if isinstance(value, str) and not value.strip():  # as a path it would be the current folder
                raise ValueError(f"{name}={value!r}: a name or a folder is accepted")
        if self.seed is not None and type(self.seed) is not int:
            raise ValueError(f"seed={self.seed!r}: a whole number is accepted")
        device = str(self.device)
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
            mac = "; a Mac runs on cpu" if device.startswith("mps") else ""
            raise ValueError(f"device={device!r}: accepted are cpu, cuda and cuda:N{mac}")
        source = str(self.generation_config)
        is_blank = not source.strip()  # as a path it would be the current folder
        has_file = Path(source, "generation_config.json").is_file()
        if source not in (FROM_MODEL, FROM_VLLM) and (is_blank or not has_file):
            raise ValueError(
                f"generation_config={source!r}: accepted are {FROM_MODEL}, {FROM_VLLM}, and a folder "
                "with a generation_config.json"
            )
        share = self.gpu_memory_utilization
        if share is not None and not 0 < share <= 1:
            raise ValueError(f"gpu_memory_utilization={share}: a share is accepted, above 0 and up to 1")
        if not 0 <= self.swap_space < float("inf"):
            raise ValueError(f"swap_space={self.swap_space}: a number of GiB is accepted, 0 or more")
        if self.speculative_config is not None:
            SpeculativeConfig.from_dict(self.speculative_config)

    def _check_combinations(self) -> None:
        """Check fields that need one another or exclude one another. Raises ValueError."""
        if self.preemption_mode == "swap" and not self.swap_space:
            raise ValueError("preemption_mode='swap' needs a swap_space; it is 0")
        if self.swap_space and self.preemption_mode == "recompute":
            raise ValueError(f"swap_space={self.swap_space} has no use with preemption_mode='recompute'")
        if self.gpu_memory_utilization and self.kv_cache_memory_bytes:
            raise ValueError(
                f"gpu_memory_utilization={self.gpu_memory_utilization} has no use with "
                f"kv_cache_memory_bytes={self.kv_cache_memory_bytes}: one or the other is accepted"
            )
        for name in ("block_size", "enable_prefix_caching", "swap_space", "preemption_mode"):
            if self.kv_cache == "slots" and getattr(self, name):
                raise ValueError(f"{name}={getattr(self, name)!r} needs kv_cache='paged'; it is 'slots'")
        for name in ("max_loras", "max_lora_rank"):
            default = getattr(type(self), name)
            if not self.enable_lora and getattr(self, name) != default:
                raise ValueError(f"{name}={getattr(self, name)!r} needs enable_lora=True; it is False")
        num_seqs, num_tokens = self.max_num_seqs, self.max_num_batched_tokens
        if num_seqs is not None and num_tokens is not None and num_seqs > num_tokens:
            raise ValueError(
                f"max_num_seqs={num_seqs} is more than max_num_batched_tokens={num_tokens}: each running "
                "request needs a token in every step"
            )


def _check_value(spec: Field, value: Any) -> None:
    """Check a value by its field's type, and by the extension that brings the field. Raises ValueError."""
    accepted = choices(spec.type)
    if accepted and value not in accepted:
        raise ValueError(f"{spec.name}={value!r}: accepted are {', '.join(map(str, accepted))}")
    _check_number(spec, value)
    letter = spec.metadata["extension"]
    if letter and value != spec.default and not is_here(letter):
        extension = f"Extension {letter} ({EXTENSIONS[letter]})"
        raise ValueError(
            f"{spec.name}={value!r}: comes with {extension}, whose files are not here; {spec.default!r} is "
            "accepted"
        )


def _check_number(spec: Field, value: Any) -> None:
    """Check the value of a field whose type is a number; nothing for other fields. Raises ValueError."""
    members = union_members(spec.type)
    if value is None and NoneType in members:
        return
    is_count = int in members and spec.name != "seed"  # all other whole numbers count something
    if is_count and not (_is_number(value, int) and value >= 1):
        raise ValueError(f"{spec.name}={value!r}: at least 1 is accepted")
    if float in members and not _is_number(value, int | float):
        raise ValueError(f"{spec.name}={value!r}: a number is accepted")


def _is_number(value: Any, kind: type | UnionType) -> bool:
    """Whether `value` is a number of this kind. To Python, True and False are numbers, too."""
    return isinstance(value, kind) and not isinstance(value, bool)


def choices(kind: Any) -> tuple:
    """The values that a field of this type accepts. For a Literal they are its values, for a bool True and
    False, and None is added if the type allows None. Returns () for any other type.
    """
    if kind is bool:
        return True, False
    if get_origin(kind) is Literal:
        return get_args(kind)
    members = union_members(kind)
    if len(members) == 1:
        return ()
    accepted: list[Any] = []
    for member in members:
        accepted += choices(member)
    if accepted and NoneType in members:
        accepted.append(None)
    return tuple(accepted)


def union_members(kind: Any) -> tuple:
    """The types of a union such as `int | None`. For a type that is no union, the type alone."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def takes_mapping(kind: Any) -> bool:
    """Whether a field of this type accepts a mapping: its type is a Mapping, or a union with one."""
    return any(get_origin(member) is Mapping for member in union_members(kind))
