"""How to speculate: vLLM's `speculative_config`, checked. Part 16."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from engine.speculation.step_times import StepTimes

METHODS = ("draft_model", "ngram")
# The most drafts of a request in a step. Further drafts would hardly ever be accepted, and cost as much time.
MAX_DRAFTS = 16


@dataclass(frozen=True)
class SpeculativeConfig:
    """How drafts are proposed. The fields are those of vLLM's speculative_config; each whole number is from 1
    to MAX_DRAFTS.
    """

    num_speculative_tokens: int  # the most drafts of a request in a step; fewer if more do not pay
    method: str | None = None  # None: "draft_model" if `model` is given, otherwise "ngram"
    model: str | Path | None = None  # the draft model, which has the target's tokenizer
    prompt_lookup_max: int = 4  # for "ngram": the longest end of the text, in tokens, that is looked up
    prompt_lookup_min: int = 2  # for "ngram": the shortest
    # How long a step takes, by its number of drafts. If None, the engine measures it at the start. With a
    # fixed table, every run chooses the same numbers of drafts.
    step_times: StepTimes | None = None

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> "SpeculativeConfig":
        """The config of a dict of field names and values; absent fields get their defaults.

        Raises ValueError, which names the field, if a field is unknown, num_speculative_tokens is missing, a
        value is out of range, or a prompt_lookup field comes without method="ngram".
        """
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
        """Check the values, and set the default method. Raises ValueError, which names the field."""
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
        has_model, needs_model = self.model is not None, method == "draft_model"
        if has_model != needs_model:
            needs = "needs a model" if needs_model else f"has no use for model={self.model!r}"
            raise ValueError(f"speculative_config: method={method!r} {needs}")
