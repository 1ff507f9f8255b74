"""How to speculate: vLLM's `speculative_config`, checked. Part 16."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from engine.speculation.step_times import StepTimes

METHODS = ("draft_model", "ngram")
# The most drafts of a request in a step; each draft is one token. (The counts for Prometheus follow vLLM:
# there all tokens that are proposed at once for a request are one draft.) Further drafts would hardly ever be
# accepted, and cost as much time.
MAX_DRAFTS = 16
LOOKUP_FIELDS = ("prompt_lookup_max", "prompt_lookup_min")  # for method "ngram" only


@dataclass(frozen=True)
class SpeculativeConfig:
    """How drafts are proposed. The fields are those of vLLM's speculative_config; each whole number is from 1
    to MAX_DRAFTS. Raises ValueError, which names the field, for any other value.
    """

    num_speculative_tokens: int  # the most drafts of a request in a step; fewer if more do not pay
    method: str | None = None  # None: "draft_model" if `model` is given, otherwise "ngram"
    model: str | Path | None = None  # the draft model, which has the target's tokenizer
    # For "ngram": the longest and the shortest end of the text, in tokens, that is looked up.
    prompt_lookup_max: int | None = None  # None: 4, or prompt_lookup_min if that is more
    prompt_lookup_min: int | None = None  # None: 2, or prompt_lookup_max if that is less
    # How long a step takes, by its number of drafts. If None, the engine measures it at the start. With a
    # fixed table, every run chooses the same numbers of drafts.
    step_times: StepTimes | None = None

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> "SpeculativeConfig":
        """The config of a dict of field names and values; absent fields get their defaults.

        Raises ValueError, which names the field, if a field is unknown, num_speculative_tokens is missing, a
        value is not accepted, or a field of LOOKUP_FIELDS is given for another method than "ngram".
        """
        names = [field.name for field in fields(cls)]
        if not isinstance(options, Mapping):
            raise ValueError(f"speculative_config={options!r}: a mapping with {', '.join(names)} is accepted")
        for name in options:
            if name not in names:
                raise ValueError(f"speculative_config: {name!r} is unknown; accepted are {', '.join(names)}")
        if "num_speculative_tokens" not in options:
            raise ValueError("speculative_config needs num_speculative_tokens")
        values = dict(options)
        if values.get("step_times") is not None:
            values["step_times"] = StepTimes.from_dict(values["step_times"])
        return cls(**values)

    def __post_init__(self) -> None:
        """Check the values, and set the default method."""
        for name in ("num_speculative_tokens", *LOOKUP_FIELDS):
            value = getattr(self, name)
            if value is None and name in LOOKUP_FIELDS:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_DRAFTS:
                raise ValueError(f"speculative_config: {name}={value!r}: 1 to {MAX_DRAFTS} is accepted")
        longest, shortest = self.lookup_lengths
        if shortest > longest:
            raise ValueError(
                f"speculative_config: prompt_lookup_min={shortest} is more than prompt_lookup_max={longest}"
            )
        if self.method is None:
            default = "ngram" if self.model is None else "draft_model"
            object.__setattr__(self, "method", default)  # the dataclass is frozen
        self._check_method()
        if not isinstance(self.step_times, StepTimes | None):
            message = "a StepTimes is accepted"
            raise ValueError(f"speculative_config: step_times={self.step_times!r}: {message}")

    def _check_method(self) -> None:
        """Raise ValueError if the method is unknown, or has no use for a field that is given."""
        method, model = self.method, self.model
        if method not in METHODS:
            raise ValueError(f"speculative_config: method={method!r}: accepted are {', '.join(METHODS)}")
        if not isinstance(model, str | Path | None) or model == "":
            raise ValueError(f"speculative_config: model={model!r}: a name or a folder is accepted")
        if method == "draft_model" and model is None:
            raise ValueError(f"speculative_config: method={method!r} needs a model")
        if method == "ngram" and model is not None:
            raise ValueError(f"speculative_config: method={method!r} has no use for model={model!r}")
        for name in LOOKUP_FIELDS:
            value = getattr(self, name)
            if method != "ngram" and value is not None:
                raise ValueError(f"speculative_config: {name}={value!r} needs method='ngram'")

    @property
    def lookup_lengths(self) -> tuple[int, int]:
        """(longest, shortest): prompt_lookup_max and prompt_lookup_min, or their defaults. The default of one
        gives way to the other, so that either can be given alone.
        """
        longest, shortest = self.prompt_lookup_max, self.prompt_lookup_min
        if longest is None:
            longest = max(4, shortest or 0)
        if shortest is None:
            shortest = min(2, longest)
        return longest, shortest
