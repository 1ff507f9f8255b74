"""The kernels of `llama_rows.py` and `llama_row.py`, compiled for a Hopper GPU. Nothing is run.

python -m tests.part20.compiled         # without TRITON_INTERPRET: prints the kernels' names
"""

import json
import tempfile
from functools import partial
from pathlib import Path

import torch

from engine.attention.paged import Pages
from engine.kernels import llama_attend, llama_row, llama_rows
from engine.models.known_shapes import SHAPES
from engine.models.loader import load_model
from tests.part13.compiled import P, compile_instead

SMALL = {"vocab_size": 70, "num_hidden_layers": 1}


@torch.inference_mode()
def main() -> None:
    found: list[str] = []
    compile_instead(found)
    llama_rows.num_splits = lambda *shape: 4
    numbers = partial(torch.zeros, dtype=torch.int32)
    for name in ("qwen3-0.6b", "llama-3.2-1b"):
        folder = Path(tempfile.mkdtemp())
        raw = json.loads((SHAPES / name / "config.json").read_text()) | SMALL
        (folder / "config.json").write_text(json.dumps(raw))
        model = load_model(folder, "cpu", "bfloat16", "dummy")
        keys, values = torch.zeros(2, 3, P, 8, model.config.head_dim, dtype=torch.bfloat16)
        tables, lens = Pages.of([[1], [2]], [5, 6], P).on(keys.device)
        llama_attend.PROGRAMS_PER_MULTIPROCESSOR = 0
        step = llama_rows.LlamaRows(model, [keys], [values], 2)
        chain = llama_row.LlamaRow(model, [keys], [values])
        chain.pdl, chain.multiprocessors = True, 132
        chain(numbers(1), numbers(1), numbers(1), tables[:1], lens[:1])
        step(numbers(2), numbers(2), numbers(2), tables, lens)
        step.stores_first = True
        if model.config.qk_norm:
            step(numbers(2), numbers(2), numbers(2), tables, lens)
        else:  # the one kernel that is another without the norm
            angles = torch.zeros(2, 2, model.config.head_dim // 2)
            pages = keys, values, numbers(2), tables, lens
            step._attend(step.normed, model.blocks[0].attention, *angles, *pages)
    print(*found)


if __name__ == "__main__":
    main()
