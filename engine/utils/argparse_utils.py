"""`FlexibleArgumentParser`, at vLLM's import path. Part 20."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An ArgumentParser for which `_` and `-` are the same in a flag: --max_model_len is --max-model-len."""

    def parse_known_args(  # type: ignore[override]  # the parent's has overloads for mypy
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """As in ArgumentParser; `parse_args` calls this, too."""
        if args is None:
            args = sys.argv[1:]
        return super().parse_known_args(list(self._with_known_flags(args)), namespace)

    def _with_known_flags(self, args: Sequence[str]) -> Iterator[str]:
        """`args`, with each known flag spelled as it was added to the parser. Unknown flags and values do not
        change.
        """
        flags = {flag.replace("_", "-"): flag for flag in self._option_string_actions}
        for arg in args:
            flag, equals, value = arg.partition("=")
            known_flag = flags.get(flag.replace("_", "-")) if flag.startswith("--") else None
            yield arg if known_flag is None else known_flag + equals + value
