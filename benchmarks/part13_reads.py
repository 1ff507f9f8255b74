"""Which program of the decode kernel reads which block?

    python -m benchmarks.part13_reads       # seconds, on a CPU in Triton's interpreter

The kernel itself is asked: a block's values are NaN, and the programs whose part of the result is NaN have
read it. One block after the other.
"""

import os

import numpy as np
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before a kernel is defined

from benchmarks.record import record
from engine.attention.paged import Pages
from engine.kernels.flash_prefill import MIN_DOT_SIZE
from engine.kernels.paged_attention import TILE, _attend

LENS, HEADS, SPLITS = (300, 150, 40), 1, 4
NUM_BLOCKS, P, DH = 40, 16, 16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def scattered(lens: tuple[int, ...], num_blocks: int = NUM_BLOCKS, seed: int = 0) -> Pages:
    """Sequences whose blocks lie anywhere in the memory."""
    counts = [-(-n // P) for n in lens]
    order = np.random.default_rng(seed).permutation(num_blocks)[: sum(counts)]
    return Pages.of(np.split(order, np.cumsum(counts)[:-1]), lens, P)


def parts_of(pages: Pages, values: torch.Tensor, splits: int) -> torch.Tensor:
    """What each program leaves behind, summed over a head's columns: [S, HEADS, splits]."""
    S = len(pages.lens)
    q, keys = torch.zeros(S, HEADS, DH, device=DEVICE), torch.zeros_like(values)
    parts = torch.zeros(S, HEADS, splits, DH, device=DEVICE)
    stats = torch.zeros(2, S, HEADS, splits, device=DEVICE)
    tables, lens = pages.on(torch.device(DEVICE))
    _attend[(HEADS, S, splits)](
        q, keys, values, tables, lens, parts, parts, stats[0], stats[1], tables.stride(0), 1.0,
        HKV=HEADS, P=P, TOKENS=TILE, PADDED=MIN_DOT_SIZE, HQ=HEADS, DH=DH, DH_PADDED=16, SPLITS=splits,
    )  # fmt: skip
    return parts.sum(-1)


def readers(pages: Pages, splits: int, num_blocks: int = NUM_BLOCKS) -> list[list[tuple[int, int]]]:
    """By block: the programs that read it, as (sequence, part) of key head 0."""
    found = []
    for block in range(num_blocks):
        values = torch.zeros(num_blocks, P, HEADS, DH, device=DEVICE)
        values[block] = torch.nan
        touched = parts_of(pages, values, splits)[:, 0].isnan().nonzero()
        found.append([(int(s), int(part)) for s, part in touched])
    return found


def main() -> None:
    pages = scattered(LENS)
    found = readers(pages, SPLITS)
    for block, programs in enumerate(found):
        print(block, programs)
    workload = {"lens": LENS, "blocks": NUM_BLOCKS, "tokens_per_block": P, "tile": TILE, "splits": SPLITS}
    tables = [table[: -(-n // P)].tolist() for table, n in zip(pages.tables, LENS, strict=True)]
    record("part13_reads", __doc__.splitlines()[0], workload, {"readers": found, "tables": tables})


if __name__ == "__main__":
    main()
