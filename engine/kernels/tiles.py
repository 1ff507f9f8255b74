"""How the rows of a weight matrix are divided among the programs of a kernel. Part 13.

The chains for one row (single_row.py, llama_row.py, quantized_row.py) share this record.
"""

from typing import Any, NamedTuple

import torch
import triton


class Tile(NamedTuple):
    """How the rows of a weight matrix are divided among programs."""

    rows: int  # rows of the matrix that a program takes at a time
    warps: int  # warps of a program
    resident: int | None  # programs on a multiprocessor, which loop over tiles; None: one program a tile
    registers: int | None = None  # the most registers of a thread with PDL; None: the compiler chooses

    def num_programs(self, num_rows: int, multiprocessors: int) -> int:
        """The number of programs for a matrix of `num_rows` rows."""
        tiles = triton.cdiv(num_rows, self.rows)
        return min(tiles, self.resident * multiprocessors) if self.resident else tiles

    def launch_options(self, num_rows: int, multiprocessors: int, pdl: bool) -> dict[str, Any]:
        """The kernel's constants and launch options for this tile and a matrix of `num_rows` rows."""
        programs = self.num_programs(num_rows, multiprocessors)
        options = {"ROWS": self.rows, "PROGRAMS": programs, "PDL": pdl, "launch_pdl": pdl}
        options["num_warps"] = self.warps
        if self.registers and pdl:
            options["maxnreg"] = self.registers
        return options


def num_multiprocessors(device: torch.device) -> int:
    """The GPU's number of multiprocessors; 1 for the interpreter, which runs one program after the other."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
