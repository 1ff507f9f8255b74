"""`SamplingParams`, at vLLM's import path. Part 20."""

from typing import NoReturn

from engine.decoding.params import SamplingParams

__all__ = ["SamplingParams"]
LATER = ("BeamSearchParams", "StructuredOutputsParams", "GuidedDecodingParams")


def __getattr__(name: str) -> NoReturn:
    if name in LATER:
        raise ImportError(f"{name}: structured output and beam search come with Extension B")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
