"""The kernels of Part 18, compiled for a Hopper GPU as their callers launch them; nothing is run.

python -m tests.part18.compiled         # without TRITON_INTERPRET: prints the kernels' names
"""

import torch

from engine.lora.tiles import TiledRows
from tests.part13.compiled import compile_instead


def main() -> None:
    found: list[str] = []
    compile_instead(found)
    rows = TiledRows(64, 4, torch.device("cpu"))
    for dtype in (torch.bfloat16, torch.float32):
        for K in (8, 48):  # padded to 16, and to 64
            x, y = torch.zeros(40, 320, dtype=dtype), torch.zeros(40, 960, dtype=dtype)
            rows.add(y, x, torch.zeros(4, 320, K, dtype=dtype), torch.zeros(4, K, 960, dtype=dtype))
    print(*found)


if __name__ == "__main__":
    main()
