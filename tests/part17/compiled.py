"""The kernels of Part 17, compiled for a Hopper GPU as their callers launch them, without one (see Part
13's).

python -m tests.part17.compiled         # without TRITON_INTERPRET: prints the kernels' names
"""

import tempfile
from functools import partial
from pathlib import Path

import torch

from benchmarks.shapes import GPT2_XL, dummy_folder
from engine.kernels.quantized_matmul import int4_linear, int8_linear
from engine.kernels.tiles import Tile
from engine.models.loader import load_model
from engine.quantization.quantize import quantize
from engine.quantization.single_row import QuantizedSingleRow
from tests.part13.compiled import compile_instead

SHAPES = [(4096, 4096), (256, 1000)]  # N, K
SMALL = GPT2_XL | {"vocab_size": 70, "n_embd": 320, "n_head": 5, "n_layer": 1}


@torch.inference_mode()
def main() -> None:
    found: list[str] = []
    compile_instead(found)
    numbers = partial(torch.zeros, 1, dtype=torch.int32)
    for method in ("int8", "int4"):
        transform = partial(quantize, method=method)
        folder = dummy_folder(Path(tempfile.mkdtemp()), SMALL)
        row = QuantizedSingleRow(load_model(folder, "cpu", "bfloat16", "dummy", transform=transform), [], [])
        row.multiprocessors, row.tiles = 132, dict.fromkeys(row.tiles, Tile(2, 4, 1))
        block = row.operands.blocks[0]
        row.launch_embed(numbers(), numbers())
        row.launch_norm_linear("up", block.up, row.inner, gelu=True)
        row.launch_linear_add("down", row.inner, block.down)
    for dtype in (torch.bfloat16, torch.float32):
        for N, K in SHAPES if dtype == torch.bfloat16 else SHAPES[1:]:
            bias = torch.zeros(N, dtype=dtype)
            for T in (1, 2, 64) if K == 4096 else (1, 2):
                x = torch.zeros(T, K, dtype=dtype)
                int8_linear(x, torch.zeros(N, K, dtype=torch.int8), torch.zeros(N), bias)
                for group_size in (32, 128) if K == 4096 else (64,):
                    groups = torch.zeros(N, -(-K // group_size), dtype=torch.float16)
                    nibbles = torch.zeros(N, K // 2, dtype=torch.uint8)
                    int4_linear(x, nibbles, groups, groups, bias, group_size)
    print(*sorted(set(found)))


if __name__ == "__main__":
    main()
