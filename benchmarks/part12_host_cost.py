"""What do pages cost the host per step, beside the model: scheduler and block manager at 256 sequences?

    python -m benchmarks.part12_host_cost [--sequences 256] [--windows 12]

Processor time per step, by phase, of sequences that decode from 1,000 tokens on: `schedule` (with the
reservation of blocks, and the whole record of the step), `update` (with the commitment of full blocks to the
prefix cache), and of the first, the block tables and slot mapping, made once more. No model, no attention.
Each is the mean of 20 steps, in the median of --windows.
"""

import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.record import middle, quartiles, record, show, whole_numbers
from engine.cache.paged import PagedCache
from engine.decoding.params import SamplingParams
from engine.decoding.sampling_state import SamplingState
from engine.requests.request import Request
from engine.scheduling.continuous import ContinuousScheduler

TOKENS, WINDOW, BLOCK = 1000, 20, 16


class Endless:
    """Stands for an output without text or end."""

    token_ids: tuple = ()
    limit = 10**9

    def append(self, token_id: int) -> bool:
        return False


def cost(sequences: int, windows: int) -> dict[str, list[float]]:
    """phase -> ms of processor time per step, of each window."""
    num_blocks = sequences * (TOKENS + (windows + 2) * WINDOW) // BLOCK + sequences
    cache = PagedCache(num_blocks, BLOCK)
    scheduler = ContinuousScheduler(cache, sequences, sequences * TOKENS)
    params = SamplingParams()
    for i in range(sequences):
        ids = [(i * 7919 + j) % 4096 for j in range(TOKENS)]
        state = SamplingState(params, ids, [], i)
        scheduler.add(Request(str(i), str(i), ids, TOKENS, params, Endless(), state))
    spent = {"schedule": [], "update": [], "tables and slots": []}
    for number in range(1 + windows * WINDOW):
        start = time.process_time()
        step = scheduler.schedule()
        scheduled = time.process_time()
        batch = step.batch
        cache.locate(batch.ids, batch.query_start, batch.positions)
        mapped = time.process_time()
        for request in step.requests:
            request.confirm(number % 4096, 0.0)
        confirmed = time.process_time()
        scheduler.update(step)
        if number:  # the first one admitted everybody
            spent["schedule"].append(scheduled - start)
            spent["tables and slots"].append(mapped - scheduled)
            spent["update"].append(time.process_time() - confirmed)
    assert len(step.requests) == sequences
    return {
        name: (np.array(times).reshape(windows, WINDOW).mean(1) * 1e3).tolist()
        for name, times in spent.items()
    }


def main() -> None:
    args = whole_numbers(__doc__.splitlines()[0], sequences=256, windows=12)
    torch.set_num_threads(1)
    found = cost(args.sequences, args.windows)
    both = [a + b for a, b in zip(found["schedule"], found["update"], strict=True)]
    rows = [[name, middle(ms)] for name, ms in (found | {"scheduler and block manager": both}).items()]
    tables = {"cost": {"columns": ["phase", "ms a step"], "rows": rows}}
    figures = {
        "ms": {name: quartiles(ms) for name, ms in found.items()},
        "scheduler_and_block_manager_ms": statistics.median(both),
        "rounds": {"scheduler_and_block_manager_ms": quartiles(both)},
    }
    workload = {
        "sequences": args.sequences, "tokens": TOKENS, "block_size": BLOCK, "windows": args.windows,
    }  # fmt: skip
    show(record("part12_host_cost", __doc__.splitlines()[0], workload, figures, tables), tables)


if __name__ == "__main__":
    main()
