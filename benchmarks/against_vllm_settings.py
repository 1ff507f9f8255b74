"""How each engine is started in the race against vLLM: threads, cores, libraries, compiled or eager.

vLLM's are those that its documents for CPUs name (docs.vllm.ai, "Installation", "CPU"): tcmalloc and Intel's
OpenMP preloaded, threads bound to cores, in one process where that can be. The bounds of both engines are
the same: 32 sequences, no prefix cache, a GiB of keys and values.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import Racer
from benchmarks.record import ROOT

OURS, THEIRS = "ruvon", "vLLM"
SIDE = Path(__file__).with_name("against_vllm_side.py")
SEATS, GIB = 32, 2**30
CORES = (
    sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
)
TCMALLOC = "libtcmalloc_minimal.so.4"
IOMP = "libiomp5.so"


@dataclass(frozen=True)
class Setting:
    """One way to start one engine. `quick`: whether it is one of those that --quick tries."""

    engine: str
    threads: int
    eager: bool = True
    quick: bool = False

    def offline(self, folder: Path, python: Path, log: Path, max_model_len: int) -> Racer:
        """against_vllm_side.py with this engine."""
        options: dict[str, Any] = {
            "model": str(folder), "dtype": "float32", "max_model_len": max_model_len, "max_num_seqs": SEATS,
            "enable_prefix_caching": False, "enforce_eager": self.eager,
        }  # fmt: skip
        if self.engine == OURS:
            options |= {"kv_cache_memory_bytes": GIB}
            command = [sys.executable, "-P", str(SIDE), "engine", json.dumps(options)]
            return Racer(command, self.environment(python), log)
        command = [str(python), "-P", str(SIDE), "vllm", json.dumps(options)]
        alone = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | self._bound()
        return Racer(command, self.environment(python) | alone, log)

    def server(self, folder: Path, python: Path, log: Path, max_model_len: int, port: int) -> Racer:
        """`ruvon serve` or `vllm serve`, with the folder's name as the model's."""
        flags = ["--dtype", "float32", "--max-model-len", str(max_model_len), "--max-num-seqs", str(SEATS)]
        flags += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "model"]
        flags += ["--no-enable-prefix-caching"]
        if self.engine == OURS:
            command = [sys.executable, "-m", "engine.cli.main", "serve", str(folder), *flags]
            command += ["--kv-cache-memory-bytes", str(GIB)]
            return Racer(command, self.environment(python), log)
        flags += ["--enforce-eager"] if self.eager else []
        # The engine's process binds its threads itself; the API's process beside it is not bound.
        bound = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, CORES[: self.threads]))}
        command = [str(vllm_command(python)), "serve", str(folder), *flags]
        return Racer(command, self.environment(python) | bound, log)

    def environment(self, python: Path) -> dict[str, str]:
        """The environment's variables, without those that the caller set for the other engine."""
        ours = {"OMP_NUM_THREADS": str(self.threads), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        others = ("OMP_", "KMP_", "GOMP_", "VLLM_", "LD_PRELOAD", "PYTHONPATH")
        given = {key: value for key, value in os.environ.items() if not key.startswith(others)}
        if self.engine == OURS:
            return given | ours | {"PYTHONPATH": str(ROOT)}
        return given | ours | vllm_environment(python)

    def _bound(self) -> dict[str, str]:
        """What vLLM sets for its engine's process with Intel's OpenMP; in one process it sets nothing."""
        cores = ",".join(map(str, CORES[: self.threads]))
        bound = {"KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{cores}]"}
        return bound | {"KMP_BLOCKTIME": "5", "KMP_TPAUSE": "0"}


SETTINGS = {
    **{
        f"{OURS}, {threads} threads": Setting(OURS, threads, quick=threads == 1)
        for threads in sorted({1, len(CORES)})
    },
    **{
        f"{THEIRS}, {'eager' if eager else 'compiled'}, {threads} threads": Setting(
            THEIRS, threads, eager, quick=eager and threads == 1
        )
        for eager in (True, False)
        for threads in sorted({1, len(CORES)})
    },
}


def vllm_environment(python: Path) -> dict[str, str]:
    """Both libraries preloaded. Raises SystemExit, with what to install, if one is not there."""
    folders = (python.parent.parent / "lib", Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib64"))
    preloaded = []
    for library, where in ((TCMALLOC, "Debian's libtcmalloc-minimal4"), (IOMP, "intel-openmp, beside vLLM")):
        path = next((folder / library for folder in folders if (folder / library).exists()), None)
        if path is None:
            raise SystemExit(f"{library} is in none of {', '.join(map(str, folders))}: it is in {where}")
        preloaded.append(str(path))
    return {
        "LD_PRELOAD": ":".join(preloaded), "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }  # fmt: skip


def vllm_command(python: Path) -> Path:
    return python.parent / "vllm"


def vllm_versions(python: Path) -> Mapping[str, str]:
    """The versions in vLLM's environment."""
    packages = ("torch", "transformers", "intel-openmp", "numpy")
    program = (
        "import json, platform; from importlib.metadata import version; "
        f"print(json.dumps({{'python': platform.python_version(), 'vllm-cpu': version('vllm-cpu')}} "
        f"| {{name: version(name) for name in {packages}}}))"
    )
    done = subprocess.run([str(python), "-c", program], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)
