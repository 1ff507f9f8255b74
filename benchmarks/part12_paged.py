"""What do pages cost and save beside slots: Part 8's workload, and 32 requests that share a beginning?

    python -m benchmarks.part12_paged [--repeats 5]

1. Part 8's 128 requests on `storyteller`, 8 at once, over slots and over pages with the same room; prompts
   are random and share nothing. Best of 1 and 2 torch threads for each side.
2. 32 requests, all at once, that share their first 256 tokens and differ in the next 16: the time to the
   first token, with the prefix cache on (one with the same beginning came before) and off.
"""

import argparse
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.record import record
from benchmarks.workloads import interleaved, jobs
from engine.cache.memory import PageMemory
from engine.cache.slots import SlotMemory
from engine.core.llm_engine import LLMEngine
from engine.decoding.params import SamplingParams
from engine.execution.runner import EagerWay, ModelRunner
from engine.layers.packed_linear import pack_linears
from engine.models.loader import load_model
from engine.scheduling.continuous import ContinuousScheduler
from engine.text.tokenizer import Tokenizer

WIDTH, BUDGET, ROOM, BLOCK = 8, 512, 256, 16
SLOTS, PAGED, BARE = "slots", "pages, prefix cache on", "pages, prefix cache off"
SHARED, OWN, CROWD = 256, 16, 32


def run(kind: str, model, tokenizer, work, width: int, room: int) -> LLMEngine:
    """An engine with all of `work` queued."""
    if kind == SLOTS:
        memory = SlotMemory(model.config, width, room)
        cache = memory.plan()
    else:
        memory = PageMemory(model.config, width * room // BLOCK, BLOCK)
        cache = memory.plan(enable_prefix_caching=kind == PAGED)
    scheduler, runner = (
        ContinuousScheduler(cache, width, BUDGET),
        ModelRunner([EagerWay(model, memory)], memory),
    )
    engine = LLMEngine(tokenizer, model.config, scheduler, runner, max_model_len=room)
    for i, (prompt, tokens) in enumerate(work):
        engine.add_request(str(i), prompt, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
    return engine


def to_the_end(engine: LLMEngine) -> tuple[float, dict]:
    """(seconds, last output of each request)"""
    start, done = time.perf_counter(), {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output
    return time.perf_counter() - start, done


def race(
    model, tokenizer, requests: int, tried: list[int], repeats: int
) -> tuple[dict[str, float], dict[str, int]]:
    """Seconds of Part 8's workload, by kind; and the threads that were best for it."""
    work = jobs(requests, model.config.vocab_size)
    sides = {}
    for kind in (SLOTS, PAGED, BARE):
        for threads in tried:

            def one(kind=kind, threads=threads) -> float:
                torch.set_num_threads(threads)
                return to_the_end(run(kind, model, tokenizer, work, WIDTH, ROOM))[0]

            sides[kind, threads] = one
    seconds = interleaved(sides, repeats)
    threads = {kind: min(tried, key=lambda n: seconds[kind, n]) for kind in (SLOTS, PAGED, BARE)}
    return {kind: seconds[kind, n] for kind, n in threads.items()}, threads


def crowd(kind: str, model, tokenizer) -> tuple[float, float, list]:
    """(median, worst seconds to the first token, everybody's tokens) of requests with a common beginning."""
    torch.set_num_threads(1)
    vocab = model.config.vocab_size
    shared = [(i * 37 + 11) % (vocab - 1) + 1 for i in range(SHARED)]
    engine = run(kind, model, tokenizer, [([*shared, 7], 1)], CROWD, SHARED + 64)
    to_the_end(engine)
    for i in range(CROWD):
        own = [(i * 101 + j * 13) % (vocab - 1) + 1 for j in range(OWN)]
        engine.add_request(
            f"c{i}", [*shared, *own], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        )
    _, done = to_the_end(engine)
    waits = [output.stats.time_to_first_token for output in done.values()]
    return statistics.median(waits), max(waits), [done[f"c{i}"].outputs[0].token_ids for i in range(CROWD)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="those that are tried")
    options = parser.parse_args()
    tokenizer = Tokenizer.from_pretrained("storyteller")
    model = load_model("storyteller", transform=partial(pack_linears, rows=WIDTH))
    seconds, threads = race(model, tokenizer, options.requests, options.threads, options.repeats)
    kinds = (BARE, PAGED)
    found = {kind: [crowd(kind, model, tokenizer) for _ in range(options.repeats)] for kind in kinds}
    same = found[PAGED][0][2] == found[BARE][0][2]
    middle = {kind: statistics.median(one[0] for one in found[kind]) for kind in kinds}
    worst = {kind: statistics.median(one[1] for one in found[kind]) for kind in kinds}
    race_rows = [[kind, threads[kind], seconds[kind], seconds[kind] / seconds[SLOTS]] for kind in seconds]
    crowd_rows = [[kind, middle[kind] * 1e3, worst[kind] * 1e3] for kind in kinds]
    for row in race_rows:
        print("{:28} {} threads {:6.2f} s, {:.3f} of slots'".format(*row))
    for row in crowd_rows:
        print("{:28} first token after {:.0f} ms (median), {:.0f} ms (worst)".format(*row))
    print(f"first token {middle[BARE] / middle[PAGED]:.1f} times sooner; same tokens: {same}")
    record(
        "part12_paged",
        __doc__.splitlines()[0],
        {"requests": options.requests, "prompt_tokens": "8 to 128", "output_tokens": "16 to 128",
         "at once": WIDTH,
         "room": ROOM, "block_size": BLOCK, "max_num_batched_tokens": BUDGET, "repeats": options.repeats,
         "torch_threads": options.threads, "crowd": f"{CROWD} requests, {SHARED} tokens shared, {OWN} own"},
        {"paged_over_slots": seconds[PAGED] / seconds[SLOTS],
         "bare_over_slots": seconds[BARE] / seconds[SLOTS],
         "seconds": seconds, "ttft_times_lower": middle[BARE] / middle[PAGED],
         "ttft_worst_times_lower": worst[BARE] / worst[PAGED], "same_tokens": same},
        {"race": {"columns": ["cache", "threads", "seconds", "of slots'"], "rows": race_rows},
         "crowd": {"columns": ["32 requests, 256 tokens shared", "median ms to the first token", "worst"],
                   "rows": crowd_rows}},
    )  # fmt: skip


if __name__ == "__main__":
    main()
