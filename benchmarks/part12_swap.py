"""What is cheaper for a preempted sequence: copying its blocks out and back, or computing its tokens again?

    python -m benchmarks.part12_swap [--repeats 5]

`storyteller` in fp32 on one thread, weights packed; a sequence of n tokens alone. "Swap" is the time of both
copies; "recompute" that of one forward pass over n tokens; the two take turns. Below it, Part 12's scene
(twenty requests in the memory of four contiguous ones), run to its end in both ways, with and without the
prefix cache, in rounds.
"""

import sys
import time
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.part12_blocks import BLOCK, lengths, play
from benchmarks.record import middle, quartiles, record, show, whole_numbers
from benchmarks.workloads import rounds
from engine.cache.memory import PageMemory
from engine.cache.paged import SWAP_FROM
from engine.decoding.params import SamplingParams
from engine.decoding.sampling_state import SamplingState
from engine.execution.runner import EagerWay, ModelRunner
from engine.layers.packed_linear import pack_linears
from engine.models.loader import load_model
from engine.requests.request import Request
from engine.scheduling.scheduler import Queues
from engine.text.tokenizer import Tokenizer

LENGTHS = (1, 4, 16, 32, 64, 128, 256, 512, 1000)


def one_way_back(model, length: int, repeats: int) -> dict[str, list[float]]:
    """Milliseconds of both ways for one sequence of so many tokens, by round."""
    memory = PageMemory(model.config, 80, BLOCK, num_swap_blocks=80)
    cache = memory.plan(preemption_mode="swap", enable_prefix_caching=False)
    runner, queues = ModelRunner([EagerWay(model, memory)], memory), Queues(cache)
    ids, params = [7 + i for i in range(length + 1)], SamplingParams()
    request = Request("a", "a", ids, length, params, None, SamplingState(params, ids, [], 0))
    swap, compute = [], []
    for _ in range(1 + repeats):  # the first warms up
        request.num_computed_tokens = cache.admit(request)
        cache.reserve(request, length)
        start = time.perf_counter()
        runner.submit(queues.make_step([(request, length)]).batch).result()
        compute.append((time.perf_counter() - start) * 1e3)
        cache.commit(request, length)
        start = time.perf_counter()
        cache.preempt(request)
        back = cache.admit(request)
        memory.apply(cache.take_copies())
        swap.append((time.perf_counter() - start) * 1e3)
        assert back == length
        cache.release(request)
    return {"swap": swap[1:], "recompute": compute[1:]}


def main() -> None:
    options = whole_numbers(__doc__.splitlines()[0], repeats=5)
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_pretrained("storyteller")
    model = load_model("storyteller", transform=partial(pack_linears, rows=20))
    times = {length: one_way_back(model, length, options.repeats) for length in LENGTHS}

    asked = lengths()
    prompts = [[100 + i] + [11 + j % 50 for j in range(prompt - 1)] for i, (prompt, _) in enumerate(asked)]
    outputs = [output for _, output in asked]
    counts: dict[str, tuple[int, int, int]] = {}  # preemptions, swapped, tokens found again
    told = []

    def scene(mode: str, prefix_caching: bool) -> float:
        memory = PageMemory(model.config, 4 * 1024 // BLOCK, BLOCK, num_swap_blocks=400)
        cache = memory.plan(preemption_mode=mode, enable_prefix_caching=prefix_caching)
        start = time.perf_counter()
        runner = ModelRunner([EagerWay(model, memory)], memory)
        played = play(tokenizer, model.config, cache, runner, prompts, outputs)
        seconds = time.perf_counter() - start
        told.append(played.outputs)
        assert played.outputs == told[0], "swapped or recomputed, the tokens are the same"
        counts[name_of(mode, prefix_caching)] = played.preempted, cache.num_swapped, cache.hit_tokens
        return seconds

    ways = [(mode, on) for mode in ("recompute", "swap") for on in (False, True)]
    seconds = rounds({name_of(*way): partial(scene, *way) for way in ways}, options.repeats)
    tables = {
        "way_back": {
            "columns": ["tokens", "swap out and in, ms", "compute again, ms"],
            "rows": [[length, *map(middle, of.values())] for length, of in times.items()],
        },
        "scene": {
            "columns": ["", "seconds", "preemptions", "swapped", "tokens found again"],
            "rows": [[name, middle(of), *counts[name]] for name, of in seconds.items()],
        },
    }
    workload = {
        "model": "storyteller", "repeats": options.repeats, "block_size": BLOCK, "torch_threads": 1,
        "swap_from": SWAP_FROM, "scene": "20 requests, 256 blocks",
    }  # fmt: skip
    figures = {
        "ms": {str(n): {way: quartiles(ms) for way, ms in of.items()} for n, of in times.items()},
        "scene_seconds": {name: quartiles(of) for name, of in seconds.items()},
    }
    show(record("part12_swap", __doc__.splitlines()[0], workload, figures, tables), tables)


def name_of(mode: str, prefix_caching: bool) -> str:
    return f"{mode}, prefix cache {'on' if prefix_caching else 'off'}"


if __name__ == "__main__":
    main()
