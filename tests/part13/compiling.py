"""Runs a part's `compiled.py` as a process of its own, in which Triton compiles and does not interpret."""

import os
import runpy
import sys
import traceback
from pathlib import Path


def compiled(module: str, cache: Path, *arguments: str) -> set[str]:
    """The names of the kernels that `python -m MODULE ARGUMENTS` compiled for a GPU, anew, in cache/cache."""
    names, errors = cache / "names", cache / "errors"
    child = os.fork()  # torch is imported: a new Python would need seconds for it
    if child == 0:
        sys.argv = [module, *arguments]
        os._exit(_run(module, cache, names, errors))
    _, status = os.waitpid(child, 0)
    assert status == 0, errors.read_text()[-800:]
    return set(names.read_text().split())


def _run(module: str, cache: Path, names: Path, errors: Path) -> int:
    """The child: Triton is imported again, as one that compiles, and so is what has imported it."""
    with names.open("w") as sys.stdout, errors.open("w") as sys.stderr:
        try:
            for name in list(sys.modules):
                ours = name.partition(".")[0] in ("benchmarks", "engine", "tests", "triton")
                if ours and not name.startswith("triton._C"):  # the library itself is loaded once
                    del sys.modules[name]
            os.environ.pop("TRITON_INTERPRET", None)
            os.environ["TRITON_CACHE_DIR"] = str(cache / "cache")
            runpy.run_module(module, run_name="__main__")
            return 0
        except BaseException:
            traceback.print_exc()
            return 1
