"""How work is divided among the programs of a kernel. Part 13.

A `Tile` divides the rows of a weight matrix, for the chains of single_row.py, llama_row.py and
quantized_row.py. Kernels that split a sequence's tokens take a number of splits from `power_of_2_up_to`.
"""

from typing import Any, NamedTuple

import torch
import triton


class Tile(NamedTuple):
    """How the rows of one weight matrix are divided."""

    rows: int  # rows of the matrix that a program takes at a time
    warps: int  # warps of a program
    resident: int | None  # programs on a multiprocessor, which loop over tiles; None: one program a tile
    # The most registers of a thread with PDL; None: the compiler chooses (benchmarks/part17_rows.py tries).
    registers: int | None = None

    def num_programs(self, num_rows: int, multiprocessors: int) -> int:
        """The number of programs for a matrix of `num_rows` rows."""
        tiles = triton.cdiv(num_rows, self.rows)
        return min(tiles, self.resident * multiprocessors) if self.resident else tiles

    def launch_options(self, num_rows: int, multiprocessors: int, pdl: bool) -> dict[str, Any]:
        """The kernel's constants and launch options for this tile and a matrix of `num_rows` rows."""
        programs = self.num_programs(num_rows, multiprocessors)
        options = {
            "ROWS": self.rows, "PROGRAMS": programs, "PDL": pdl, "launch_pdl": pdl, "num_warps": self.warps
        }  # fmt: skip
        if self.registers and pdl:
            options["maxnreg"] = self.registers
        return options


def num_multiprocessors(device: torch.device) -> int:
    """The GPU's number of multiprocessors; 1 for the interpreter, which runs one program after the other."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def power_of_2_up_to(n: int) -> int:
    """The largest power of two that is at most n; 0 for 0."""
    return triton.next_power_of_2(n + 1) // 2
