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
        return super().parse_known_args(list(self._named(sys.argv[1:] if args is None else args)), namespace)

    def _named(self, args: Sequence[str]) -> Iterator[str]:
        """`args`, each flag written as it was added."""
        flags = {flag.replace("_", "-"): flag for flag in self._option_string_actions}
        for arg in args:
            flag, equals, value = arg.partition("=")
            known = flags.get(flag.replace("_", "-")) if flag.startswith("--") else None
            yield arg if known is None else known + equals + value
