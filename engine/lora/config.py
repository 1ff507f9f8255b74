"""PEFT's adapter_config.json: the settings that this engine computes. Part 18.

Promises that every setting that would change the computation either has its effect or is refused by name. So
an adapter is computed as in its training. This module does not read tensors.
"""

import math
import re
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import regex

from engine.models.checkpoint import CheckpointError, read_json

# These settings describe an adapter's origin and training, and do not change the computation. The setting
# fan_in_fan_out belongs here: it describes how the *base* model keeps its weights (GPT-2's Conv1D keeps the
# transpose), not how the adapter keeps its factors.
NO_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "fan_in_fan_out",
    "inference_mode", "lora_dropout", "lora_ga_config", "loftq_config", "megatron_core", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "task_type",
}  # fmt: skip
READ = {"peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "bias", "init_lora_weights"}
# Limits for a regular expression, which comes with a file that the user may not have written.
MAX_EXPRESSION_LENGTH = 10_000  # characters; PEFT's expressions have tens, and lists of whole names thousands
MAX_REPETITIONS = 1000  # the product of all counts in braces: `regex` compiles each repetition separately
EXPRESSION_SECONDS = 2.0  # time to match all names of a model; a hostile expression could take years
INITS_OF_ADAPTER_ALONE = (True, False, "gaussian")  # other values change the base model's weights, too


@dataclass(frozen=True)
class AdapterConfig:
    """The settings of an adapter that change the computation."""

    r: int  # the rank: A[r, in], B[out, r]
    lora_alpha: float
    use_rslora: bool  # Kalajdzievski 2023, https://arxiv.org/abs/2312.03732
    target_modules: str | tuple[str, ...]  # a tuple: ends of names; a string: an expression for whole names

    @property
    def scale(self) -> float:
        """The factor of the difference: the layer adds scale · B·A to its weight."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)

    def select(self, modules: Collection[str]) -> set[str]:
        """The subset of `modules` (dotted names) that `target_modules` selects, by PEFT's rules.

        Raises TimeoutError if matching an expression takes longer than EXPRESSION_SECONDS.
        """
        if self.target_modules == "all-linear":
            return set(modules)
        if isinstance(self.target_modules, tuple):
            ends = tuple(f".{target}" for target in self.target_modules)
            return {module for module in modules if f".{module}".endswith(ends)}
        expression = regex.compile(self.target_modules)
        adapted: set[str] = set()
        deadline = time.monotonic() + EXPRESSION_SECONDS
        for module in modules:
            seconds_left = max(deadline - time.monotonic(), 1e-3)  # to `regex`, 0 or less means no limit
            # concurrent=True: `regex` releases the GIL, so other threads run while the expression is matched.
            if expression.fullmatch(module, timeout=seconds_left, concurrent=True):
                adapted.add(module)
        return adapted


def read_config(folder: Path) -> AdapterConfig:
    """Read adapter_config.json in `folder`.

    Raises CheckpointError if the file is missing or a setting is not supported. The message names the file,
    the field, its value and the accepted values.
    """
    path = folder / "adapter_config.json"
    raw = read_json(path)

    def refuse(name: str, accepted: str) -> NoReturn:
        raise CheckpointError(f"{path}: {name}={raw.get(name)!r:.80}: {accepted}")

    if raw.get("peft_type") != "LORA":
        refuse("peft_type", "'LORA' is accepted")
    r, alpha, selection = raw.get("r"), raw.get("lora_alpha"), raw.get("target_modules")
    if type(r) is not int or r < 1:
        refuse("r", "a whole number from 1 on is accepted")
    # `not … <=` and not `>`: NaN is refused, too.
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= sys.float_info.max:
        refuse("lora_alpha", "a finite number is accepted")
    if raw.get("task_type") not in (None, "CAUSAL_LM"):
        refuse("task_type", "'CAUSAL_LM' is accepted")
    if raw.get("bias", "none") != "none":
        refuse("bias", "'none' is accepted: the layers' own biases stay as they are")
    if raw.get("init_lora_weights", True) not in INITS_OF_ADAPTER_ALONE:
        refuse("init_lora_weights", "true, false and 'gaussian' are accepted: others change the base, too")
    if type(raw.get("use_rslora", False)) is not bool:
        refuse("use_rslora", "true or false is accepted")
    why_refused = _why_selection_is_refused(selection)
    if why_refused is not None:
        refuse("target_modules", why_refused)
    for name, value in raw.items():
        # 0 does not count as empty: in a setting such as layers_to_transform, 0 is the number of a layer.
        is_empty = value is None or value is False or value in ("", [], {})
        if name not in NO_EFFECT | READ and not is_empty:
            refuse(name, "not supported here; leave it empty")
    target_modules = tuple(selection) if isinstance(selection, list) else str(selection)
    return AdapterConfig(r, alpha, raw.get("use_rslora", False), target_modules)


def _why_selection_is_refused(selection: Any) -> str | None:
    """Why a value of `target_modules` is refused, or what is accepted in its place. None: it is accepted."""
    if isinstance(selection, list) and selection and all(isinstance(name, str) for name in selection):
        return None
    if not isinstance(selection, str):
        return "a list of names, or a regular expression, is accepted"
    if len(selection) > MAX_EXPRESSION_LENGTH:
        return f"an expression of at most {MAX_EXPRESSION_LENGTH:,} characters is accepted"
    if not _has_few_repetitions(selection):
        return f"in braces, counts of up to {MAX_REPETITIONS:,} together are accepted"
    try:
        re.compile(selection)  # PEFT matches with `re`, so `re` must accept the expression
        regex.compile(selection)  # `AdapterConfig.select` matches with `regex`, which has a timeout
    except (re.error, regex.error, RecursionError, OverflowError):
        return "no regular expression"
    return None


def _has_few_repetitions(expression: str) -> bool:
    """Whether the product of all counts in braces is at most MAX_REPETITIONS: 200 for `(a{10}){20}`.

    False if an opening brace is followed by anything but counts of at most three digits, such as a name.
    """
    counts: list[str] = []  # "" for one that is left out, as in {2,}
    for in_braces in re.findall(r"\{([^{}]*)", expression):
        counts += in_braces.split(",")
    if not all(re.fullmatch(r"\d{0,3}", count) for count in counts):
        return False
    factors = [max(int(count), 1) for count in counts if count]  # a 0 would hide the other counts
    return math.prod(factors) <= MAX_REPETITIONS
