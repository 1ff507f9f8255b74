"""`SamplingParams` and `StructuredOutputsParams`, at vLLM's import path, and `BeamSearchParams` where
Extension B is. Part 20.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from engine.decoding.params import SamplingParams
from engine.decoding.structured import StructuredOutputsParams

__all__ = ["SamplingParams", "StructuredOutputsParams"]
BEAM_SEARCH = f"{__package__}.decoding.beam_search"  # found by its name, since it comes after Part 20
ABSENT = {
    "BeamSearchParams": "beam search comes with Extension B",
    "GuidedDecodingParams": "vLLM's newer name for it is accepted, StructuredOutputsParams",
}


def __getattr__(name: str) -> Any:
    if name == "BeamSearchParams" and find_spec(BEAM_SEARCH) is not None:
        return import_module(BEAM_SEARCH).BeamSearchParams
    if name in ABSENT:
        raise ImportError(f"{name}: {ABSENT[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
