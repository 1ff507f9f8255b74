"""`SamplingParams` and `StructuredOutputsParams`, at vLLM's import path. Part 20."""

from typing import NoReturn

from engine.decoding.params import SamplingParams
from engine.decoding.structured import StructuredOutputsParams

__all__ = ["SamplingParams", "StructuredOutputsParams"]
ABSENT = {
    "BeamSearchParams": "beam search comes with Extension B",
    "GuidedDecodingParams": "vLLM's newer name for it is accepted, StructuredOutputsParams",
}


def __getattr__(name: str) -> NoReturn:
    if name in ABSENT:
        raise ImportError(f"{name}: {ABSENT[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
