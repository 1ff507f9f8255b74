"""Part 16's kernels, compiled for a Hopper GPU: `verify_attend.py` in its pass. Nothing is run.

python -m tests.part16.compiled         # without TRITON_INTERPRET: prints the kernels' names
"""

import tempfile
from functools import partial
from pathlib import Path

import torch

from benchmarks.shapes import dummy_folder
from engine.attention.paged import Pages
from engine.execution.verifying import VerifyRows
from engine.models.loader import load_model
from tests.part13.compiled import SHAPE, P, compile_instead


@torch.inference_mode()
def main() -> None:
    found: list[str] = []
    compile_instead(found)
    numbers = partial(torch.zeros, dtype=torch.int32)
    model = load_model(dummy_folder(Path(tempfile.mkdtemp()), SHAPE), "cpu", "bfloat16", "dummy")
    keys, values = torch.zeros(2, 3, P, model.config.num_heads, model.config.head_dim, dtype=torch.bfloat16)
    for rows, programs in ((2, 320), (20, 1)):  # split among programs, and not
        tables, lens = Pages.of([[1]] * rows, [5] * rows, P).on(keys.device)
        step = VerifyRows(model, [keys], [values], rows)
        step.attend.max_programs = programs
        step(numbers(rows), numbers(rows), numbers(rows), tables, lens)
    print(*found)


if __name__ == "__main__":
    main()
