"""What PEFT's adapter_config.json says, as far as it is computed here. Part 18.

Promises that every setting in the file has its effect or is refused by its name: an adapter that would be
computed otherwise than it was trained is not loaded. Knows no tensors.
"""

import math
import re
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import regex

from engine.models.checkpoint import CheckpointError, read_json

# Where an adapter comes from and how it was trained: they change nothing of what is computed with it now.
# fan_in_fan_out is one of them: it says how PEFT's *base* keeps its weights (GPT-2's Conv1D), not the
# adapter.
NO_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "fan_in_fan_out",
    "inference_mode", "lora_dropout", "lora_ga_config", "loftq_config", "megatron_core", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "task_type",
}  # fmt: skip
READ = {"peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "bias", "init_lora_weights"}
MAX_EXPRESSION_LENGTH = 10_000  # characters; PEFT's have tens, expressions that list whole names thousands
MAX_REPETITIONS = 1000  # the product of all counts in braces: `regex` compiles every repetition by itself
EXPRESSION_SECONDS = 2.0  # to match all names of a model; an expression can be made to take years
INITS_OF_ADAPTER_ALONE = (True, False, "gaussian")  # others change the base's weights, too


@dataclass(frozen=True)
class AdapterConfig:
    """The settings that change what is computed."""

    r: int  # the rank: A[r, in], B[out, r]
    lora_alpha: float
    use_rslora: bool  # Kalajdzievski 2023, https://arxiv.org/abs/2312.03732
    target_modules: str | tuple[str, ...]  # ends of names, or one regular expression for whole names

    @property
    def scale(self) -> float:
        """What B·A is multiplied by."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)

    def targets(self, modules: Collection[str]) -> set[str]:
        """Those of these module names that `target_modules` names, as PEFT reads it.

        Raises TimeoutError: matching an expression takes longer than EXPRESSION_SECONDS.
        """
        if self.target_modules == "all-linear":
            return set(modules)
        if isinstance(self.target_modules, tuple):
            ends = tuple(f".{target}" for target in self.target_modules)
            return {module for module in modules if f".{module}".endswith(ends)}
        expression, adapted = regex.compile(self.target_modules), set()
        deadline = time.monotonic() + EXPRESSION_SECONDS
        for module in modules:
            seconds_left = max(deadline - time.monotonic(), 1e-3)  # `regex` takes 0 or less for no limit
            if expression.fullmatch(module, timeout=seconds_left, concurrent=True):  # other threads may run
                adapted.add(module)
        return adapted


def read_config(folder: Path) -> AdapterConfig:
    """The settings of the adapter in `folder`.

    Raises CheckpointError naming the file, the field, its value and what is accepted.
    """
    path = folder / "adapter_config.json"
    raw = read_json(path)

    def refuse(name: str, accepted: str) -> NoReturn:
        raise CheckpointError(f"{path}: {name}={raw.get(name)!r:.80}: {accepted}")

    if raw.get("peft_type") != "LORA":
        refuse("peft_type", "'LORA' is accepted")
    r, alpha, targets = raw.get("r"), raw.get("lora_alpha"), raw.get("target_modules")
    if type(r) is not int or r < 1:
        refuse("r", "a whole number from 1 on is accepted")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= sys.float_info.max:
        refuse("lora_alpha", "a finite number is accepted")  # nan is refused: no comparison with it is true
    if raw.get("task_type") not in (None, "CAUSAL_LM"):
        refuse("task_type", "'CAUSAL_LM' is accepted")
    if raw.get("bias", "none") != "none":
        refuse("bias", "'none' is accepted: the layers' own biases stay as they are")
    if raw.get("init_lora_weights", True) not in INITS_OF_ADAPTER_ALONE:
        refuse("init_lora_weights", "true, false and 'gaussian' are accepted: others change the base, too")
    if type(raw.get("use_rslora", False)) is not bool:
        refuse("use_rslora", "true or false is accepted")
    if isinstance(targets, str):
        if len(targets) > MAX_EXPRESSION_LENGTH:
            refuse(
                "target_modules", f"an expression of at most {MAX_EXPRESSION_LENGTH:,} characters is accepted"
            )
        if not _has_few_repetitions(targets):
            refuse("target_modules", f"in braces, counts of up to {MAX_REPETITIONS:,} together are accepted")
        try:
            re.compile(targets)  # PEFT uses Python's own `re`
            regex.compile(targets)  # and we this, for its timeout
        except (re.error, regex.error, RecursionError, OverflowError):
            refuse("target_modules", "no regular expression")
    elif not isinstance(targets, list) or not targets or not all(isinstance(t, str) for t in targets):
        refuse("target_modules", "a list of names, or a regular expression, is accepted")
    for name, value in raw.items():
        is_empty = value is None or value is False or value in ("", [], {})  # 0 is not: it may be a layer
        if name not in NO_EFFECT | READ and not is_empty:
            refuse(name, "not supported here; leave it empty")
    targets = targets if isinstance(targets, str) else tuple(targets)
    return AdapterConfig(r, alpha, raw.get("use_rslora", False), targets)


def _has_few_repetitions(expression: str) -> bool:
    """Whether braces hold nothing but counts of at most three digits, whose product is at most
    MAX_REPETITIONS: `(a{10}){20}` repeats 200 times. False if there is something else in braces ({name}), or
    a brace is not closed.
    """
    in_braces = re.findall(r"\{([^{}]*)", expression)
    counts = [count for braces in in_braces for count in braces.split(",")]
    if not all(re.fullmatch(r"\d{0,3}", count) for count in counts):
        return False
    return math.prod(max(int(count or 1), 1) for count in counts) <= MAX_REPETITIONS
