"""How to speculate: vLLM's `speculative_config`, checked. Part 16."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from engine.speculation.step_times import StepTimes

METHODS = ("draft_model", "ngram")
# Drafts of a request in a step: one more would hardly ever be accepted, and takes as long as the first.
MAX_DRAFTS = 16


@dataclass(frozen=True)
class SpeculativeConfig:
    """Names are vLLM's."""

    num_speculative_tokens: int  # at most: fewer are proposed where more would not pay
    method: str | None = None  # default: draft_model with a model, else ngram
    model: str | Path | None = None  # the draft model; it shares the target's tokenizer
    prompt_lookup_max: int = 4  # for ngram: the longest end of the text that is looked up
    prompt_lookup_min: int = 2  # and the shortest
    # How long steps take. None: measured at the start. With a table that is handed in, all runs decide alike.
    step_times: StepTimes | None = None

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> "SpeculativeConfig":
        """Raises ValueError, which names the field."""
        names = [field.name for field in fields(cls)]
        if not isinstance(given, Mapping):
            raise ValueError(f"speculative_config={given!r}: a mapping with {', '.join(names)} is accepted")
        for name in given:
            if name not in names:
                raise ValueError(f"speculative_config: {name!r} is unknown; accepted are {', '.join(names)}")
        if "num_speculative_tokens" not in given:
            raise ValueError("speculative_config needs num_speculative_tokens")
        times = given.get("step_times")
        config = cls(**{**given, "step_times": None if times is None else StepTimes.from_dict(times)})
        for name in ("prompt_lookup_max", "prompt_lookup_min"):
            if config.method != "ngram" and name in given:
                raise ValueError(f"speculative_config: {name}={given[name]!r} needs method='ngram'")
        return config

    def __post_init__(self) -> None:
        """Sets the default method. Raises ValueError, which names the field."""
        for name in ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_DRAFTS:
                raise ValueError(f"speculative_config: {name}={value!r}: 1 to {MAX_DRAFTS} is accepted")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"speculative_config: prompt_lookup_min={self.prompt_lookup_min} is more than "
                f"prompt_lookup_max={self.prompt_lookup_max}"
            )
        method = self.method
        if method is None:
            method = "ngram" if self.model is None else "draft_model"
            object.__setattr__(self, "method", method)
        if method not in METHODS:
            raise ValueError(f"speculative_config: method={method!r}: accepted are {', '.join(METHODS)}")
        if not isinstance(self.model, str | Path | None) or self.model == "":
            raise ValueError(f"speculative_config: model={self.model!r}: a name or a folder is accepted")
        if (self.model is None) == (method == "draft_model"):
            needs = "needs a model" if method == "draft_model" else f"has no use for model={self.model!r}"
            raise ValueError(f"speculative_config: method={method!r} {needs}")
