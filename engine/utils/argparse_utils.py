"""`FlexibleArgumentParser`, at vLLM's import path. Part 20."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An ArgumentParser for which `_` and `-` are the same in a flag: --max_model_len is --max-model-len."""

    def parse_known_args(  # type: ignore[override]  # the parent's has overloads for mypy
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """As in ArgumentParser; `parse_args` calls this, too."""
        if args is None:
            args = sys.argv[1:]
        return super().parse_known_args([self._with_known_flag(arg) for arg in args], namespace)

    def _with_known_flag(self, arg: str) -> str:
        """`arg`, with its flag spelled as it was added to the parser. An unknown flag or a value is returned
        unchanged.
        """
        if not arg.startswith("--"):
            return arg
        flag, equals, value = arg.partition("=")
        for known_flag in self._option_string_actions:  # ArgumentParser's: a key for each spelling of a flag
            if known_flag.replace("_", "-") == flag.replace("_", "-"):
                return known_flag + equals + value
        return arg
