"""`SamplingParams`, at vLLM's import path, and `BeamSearchParams` where Extension B is. Part 20."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from engine.decoding.params import SamplingParams

__all__ = ["SamplingParams"]
LATER = ("StructuredOutputsParams", "GuidedDecodingParams")
BEAM_SEARCH = f"{__package__}.decoding.beam_search"  # found by its name: it comes after Part 20


def __getattr__(name: str) -> Any:
    if name == "BeamSearchParams" and find_spec(BEAM_SEARCH) is not None:
        return import_module(BEAM_SEARCH).BeamSearchParams
    if name in (*LATER, "BeamSearchParams"):
        raise ImportError(f"{name}: structured output and beam search come with Extension B")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
