"""Which kernels of `llama_row.py` keep numbers in slow memory, since a thread has at most 255 registers, with
the sizes of Qwen3-8B? Compiled for a Hopper GPU; nothing is run.

    python -m tests.part20.spilled          # without TRITON_INTERPRET: "qkv:0 proj:0 …", bytes of a thread
"""

import re
import subprocess
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from engine.kernels.llama_row import LlamaRow
from tests.part13.compiled import Hopper

D, INNER, Q, QKV, V = 4096, 12288, 4096, 6144, 151936


def spilled_bytes(ptx: str) -> int:
    """What the assembler says that it stores for each thread."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [get_ptxas(90).path, "-arch=sm_90a", "-v", str(source), "-o", f"{folder}/kernel"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return int(re.search(r"(\d+) bytes spill stores", said)[1])


def main() -> None:
    found: list[int] = []

    def compiled(kernel: JITFunction, grid, *args, **options) -> None:
        found.append(spilled_bytes(kernel.run(*args, grid=grid, warmup=True, **options).asm["ptx"]))

    driver.set_active(Hopper())
    JITFunction.__getitem__ = lambda kernel, grid: partial(compiled, kernel, grid)
    torch.set_default_device("meta")  # no numbers are needed
    linear = partial(nn.Linear, bias=False, dtype=torch.bfloat16)
    norm, empty = nn.RMSNorm(D, dtype=torch.bfloat16), partial(torch.empty, dtype=torch.bfloat16)
    chain = SimpleNamespace(
        x=torch.empty(D), config=SimpleNamespace(norm_eps=1e-6), multiprocessors=132, pdl=True
    )
    LlamaRow._launch_rms_norm_linear(chain, "qkv", norm, linear(D, QKV), empty(1, QKV))
    LlamaRow._launch_linear_add(chain, "proj", empty(Q), linear(Q, D))
    LlamaRow._launch_rms_norm_linear(chain, "gate_up", norm, linear(D, 2 * INNER), empty(INNER))
    LlamaRow._launch_linear_add(chain, "down", empty(INNER), linear(INNER, D))
    LlamaRow._launch_rms_norm_linear(chain, "head", norm, linear(D, V), torch.empty(1, V))
    print(*(f"{name}:{n}" for name, n in zip(("qkv", "proj", "gate_up", "down", "head"), found, strict=True)))


if __name__ == "__main__":
    main()
