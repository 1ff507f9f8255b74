"""vLLM's engine options that are absent here: which values are accepted, and why no others. Part 20.

A script written for vLLM often names an option with the value that asks for nothing, such as
`trust_remote_code=False`. Such a value is accepted and dropped. Any other value is refused with the reason,
so that no option is silently without effect. Imports no torch.
"""

import json
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, TypeVar

from engine.decoding.params import MAX_LOGPROBS

Options = TypeVar("Options")


class Neutral(NamedTuple):
    """The accepted values of one option, and the reason why others are refused."""

    values: tuple[Any, ...]  # argparse_flags.py takes the first as a flag's default
    reason: str

    @property
    def is_switch(self) -> bool:
        """Whether the option is a flag without a value: --name or --no-name."""
        return any(isinstance(value, bool) for value in self.values)

    def accepts(self, value: Any) -> bool:
        """Whether `value` is one of the accepted values. To Python, False equals 0; here it does not."""
        is_bool = isinstance(value, bool)
        comparable = [accepted for accepted in self.values if isinstance(accepted, bool) == is_bool]
        return value in comparable


ONE_DEVICE = "layers are not spread over devices; tensor_parallel_size splits each layer (Extension A)"
HUB = "the hub's main branch is loaded; for another revision, download it and give its folder"
REASONING = "outputs are whole texts; ruvon serve has --reasoning-parser (Extension B)"
NEUTRAL = {
    "pipeline_parallel_size": Neutral((1,), ONE_DEVICE),
    "data_parallel_size": Neutral((1,), "replicas are servers of their own: ruvon cluster (Extension A)"),
    "enable_expert_parallel": Neutral((False,), "no model with experts runs here"),
    "distributed_executor_backend": Neutral((None,), "ranks are always processes of this engine"),
    "disable_custom_all_reduce": Neutral((False, True), "sums over ranks are those of torch.distributed"),
    "trust_remote_code": Neutral((False,), "no code of a model's is run here"),
    "runner": Neutral(("auto", "generate"), "models here generate text"),
    "convert": Neutral(("auto", "none"), "models here generate text"),
    "task": Neutral(("auto", "generate", None), "models here generate text"),
    "revision": Neutral((None, "main"), HUB),
    "tokenizer_revision": Neutral((None, "main"), HUB),
    "download_dir": Neutral((None,), "files are kept in the Hugging Face cache: set HF_HOME"),
    "hf_overrides": Neutral((None, {}), "a model's config.json is read as it is: change a copy"),
    "tokenizer_mode": Neutral(("auto", "hf"), "a tokenizer is read from tokenizer.json, or from vocab.json"),
    "skip_tokenizer_init": Neutral((False,), "stop strings and texts need the tokenizer"),
    "override_generation_config": Neutral((None, {}), "say it in SamplingParams"),
    "limit_mm_per_prompt": Neutral((None, {}), "models here read text alone"),
    "kv_cache_dtype": Neutral(("auto",), "keys and values have the dtype of the model"),
    "num_gpu_blocks_override": Neutral((None,), "kv_cache_memory_bytes says how many blocks there are"),
    "cpu_offload_gb": Neutral((0,), "weights stay on one device; quantization makes them smaller"),
    "enable_sleep_mode": Neutral((False,), "an engine keeps its memory until the process ends"),
    "enable_chunked_prefill": Neutral(
        (None, True), "a prompt longer than max_num_batched_tokens is always computed in chunks"
    ),
    "scheduling_policy": Neutral(
        ("fcfs", "priority"), "requests of equal priority are served in the order in which they came"
    ),
    "compilation_config": Neutral((None, {}), "CUDA graphs alone can be chosen, by enforce_eager"),
    "attention_backend": Neutral((None,), "attention names it"),
    "logits_processors": Neutral(
        (None, []), "a step is a record of numbers that any process can compute, and a function is none"
    ),
    "max_logprobs": Neutral(
        (MAX_LOGPROBS,), f"a request may ask for 0 to {MAX_LOGPROBS} log probabilities a token"
    ),
    "logprobs_mode": Neutral(
        ("raw_logprobs",), "log probabilities are the model's, before temperature and penalties"
    ),
    "reasoning_parser": Neutral((None, ""), REASONING),
    "max_cpu_loras": Neutral((None,), "max_loras says how many adapters are kept"),
    "disable_log_stats": Neutral(
        (True,),
        "an engine logs no statistics; LLM(disable_log_stats=False) has get_metrics, a server /metrics",
    ),
    "collect_detailed_traces": Neutral((None,), "spans are of requests; trace has each step"),
    "enable_log_requests": Neutral((False,), "no request is logged"),
}


def take_neutral_options(options_class: type[Options]) -> type[Options]:
    """Decorate a dataclass of options, so that it also takes those of NEUTRAL with an accepted value.

    Any other value raises ValueError with the name, the value, what is accepted and the reason.
    """
    init: Callable[..., None] = options_class.__init__

    @wraps(init)
    def neutral_init(self: Options, *values: Any, **named_values: Any) -> None:
        for name in NEUTRAL.keys() & named_values.keys():
            _check_option(name, named_values.pop(name))  # the dataclass has no such field
        init(self, *values, **named_values)

    # mypy does not want a method to be assigned. A dataclass has an __init__, so this replaces it.
    options_class.__init__ = neutral_init  # type: ignore[assignment, method-assign]
    return options_class


def _check_option(name: str, value: Any) -> None:
    """Raise ValueError if `value` is not one of the accepted values of this option in NEUTRAL."""
    neutral = NEUTRAL[name]
    if not neutral.accepts(value):
        values = " and ".join(map(repr, neutral.values))
        verb = "is" if len(neutral.values) == 1 else "are"
        raise ValueError(f"{name}={value!r}: {values} {verb} accepted: {neutral.reason}")


def json_or_text(text: str) -> Any:
    """The value that a flag's text stands for: that of its JSON (1, null, {}), or else the text itself."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
