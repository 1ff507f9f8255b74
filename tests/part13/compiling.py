"""Runs a part's `compiled.py` as a process of its own, in which Triton compiles and does not interpret."""

import os
import subprocess
import sys
from pathlib import Path


def compiled(module: str, cache: Path) -> set[str]:
    """The names of the kernels that `python -m MODULE` compiled for a GPU, anew."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", module],
        env=environment | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-800:]
    return set(done.stdout.split())
