"""Every kernel of Part 13, compiled for a Hopper GPU as its callers launch it. Nothing is run, so it needs no
GPU: Triton brings its compiler along.

    python -m tests.part13.compiled         # without TRITON_INTERPRET: prints the kernels' names
    python -m tests.part13.compiled _store  # this one alone, or _attend
"""

import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks.shapes import GPT2_XL, dummy_folder
from engine.attention.paged import Pages
from engine.kernels import many_rows, single_row
from engine.kernels.greedy import Greedy, fetch
from engine.kernels.paged_attention import paged_attention
from engine.kernels.paged_prefill import PagedPrefill
from engine.kernels.store_kv import store_kv
from engine.models.loader import load_model

SHAPE = GPT2_XL | {"vocab_size": 70, "n_embd": 320, "n_head": 5, "n_layer": 1}  # 320: split-K fits
P = 16


class Hopper:
    """What Triton asks a driver before it compiles."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def compile_instead(found: list[str]) -> None:
    """From here on, launching a kernel compiles it, and writes its name down."""
    driver.set_active(Hopper())

    def compiled(kernel: JITFunction, grid, *args, **options) -> None:
        kernel.run(*args, grid=grid, warmup=True, **options)
        found.append(kernel.__name__)

    JITFunction.__getitem__ = lambda kernel, grid: partial(compiled, kernel, grid)
    for module in (single_row, many_rows):
        module.has_pdl = lambda device: True


@torch.inference_mode()
def compile_one(name: str) -> None:
    """`_store` or `_attend`, which are exercises: the other one may not be written yet."""
    keys, values = torch.zeros(2, 3, P, 5, 64)
    q, numbers = torch.zeros(2, 5, 64), torch.ones(2, 1, dtype=torch.int32)
    if name == "_store":
        store_kv(q, q, keys, values, numbers.ravel())
    else:
        paged_attention(q, keys, values, numbers, numbers.ravel())


@torch.inference_mode()
def compile_all() -> None:
    numbers = partial(torch.zeros, dtype=torch.int32)
    model = load_model(dummy_folder(Path(tempfile.mkdtemp()), SHAPE), "cpu", "bfloat16", "dummy")
    config = model.config
    H, Dh = config.num_heads, config.head_dim
    keys, values = torch.zeros(2, 3, P, H, Dh, dtype=torch.bfloat16)
    q = torch.zeros(2, H, Dh, dtype=torch.bfloat16)
    pages = Pages.of([[1], [2]], [5, 6], P)
    tables, lens = pages.on(q.device)
    store_kv(q, q, keys, values, numbers(2))
    for splits in (1, 4):
        paged_attention(q, keys, values, tables, lens, splits)
    PagedPrefill(pages, (0, 1, 2), keys)(q, keys, values)
    logits = torch.zeros(2, 128, dtype=torch.bfloat16)
    Greedy(70, 2, q.device)(logits, torch.zeros(2, dtype=torch.long))
    fetch(numbers(2), numbers(2), torch.zeros(2, dtype=torch.long), numbers(2))
    memory = [keys], [values]
    one, many = single_row.SingleRow(model, *memory), many_rows.ManyRows(model, *memory, 2)
    one.attend.max_programs = 1056
    one(numbers(1), numbers(1), numbers(1), tables[:1], lens[:1])
    for programs in (1056, 1):  # sequences split among programs, and not
        many.attend.max_programs = programs
        many(numbers(2), numbers(2), numbers(2), tables, lens)


def main() -> None:
    found: list[str] = []
    compile_instead(found)
    if len(sys.argv) > 1:
        compile_one(sys.argv[1])
    else:
        compile_all()
    print(*found)


if __name__ == "__main__":
    main()
