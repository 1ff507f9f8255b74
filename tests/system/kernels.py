"""Notebooks' kernels that need not import torch and Hugging Face for seconds: they fork, as in `ready`.

    python -m pytest -p nbval -p tests.system.kernels --nbval notebooks

A kernel imports the engine itself, and finds no name there: a notebook that forgets an import fails.
"""

import os
import shutil
import sys
from contextlib import suppress

from tests.system import ready

LIBRARIES = (
    "ipykernel.ipkernel", "ipykernel.kernelapp", "matplotlib.pyplot", "torch",
    "transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
)  # fmt: skip


SETTINGS = {
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",  # a kernel's own, before it imports matplotlib
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # to ask for a GPU must not start CUDA before the fork
}
if not shutil.which("nvidia-smi"):
    SETTINGS["TRITON_INTERPRET"] = "1"  # as a notebook sets it, before it imports triton


class Kernel(ready.Popen):
    libraries, settings = LIBRARIES, ready.FIXED | SETTINGS

    def __init__(self, command, **options) -> None:
        super().__init__([sys.executable, *command[command.index("-m") :]], **options)


with suppress(ImportError):
    import jupyter_client.launcher

    if hasattr(os, "fork"):
        jupyter_client.launcher.Popen = Kernel
