"""What do pages cost and save beside slots: Part 8's workload, and 32 requests that share a beginning?

    python -m benchmarks.part12_paged [--repeats 5]      # two minutes

1. Part 8's 128 requests on `storyteller`, 8 at once, over slots and over pages with the same room; prompts
   are random and share nothing. Each side has the better of 1 and 2 torch threads, by a first round of a
   quarter of the requests.
2. 32 requests, all at once, that share their first 256 tokens and differ in the next 16: the time to the
   first token, with the prefix cache on (one with the same beginning came before) and off.

The sides take turns in each round.
"""

import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.record import middle, quartiles, record, show, whole_numbers
from benchmarks.workloads import Job, faster_threads, jobs, ratios, rounds
from engine.cache.memory import PageMemory
from engine.cache.slots import SlotMemory
from engine.core.llm_engine import LLMEngine
from engine.decoding.params import SamplingParams
from engine.execution.runner import EagerWay, ModelRunner
from engine.layers.packed_linear import pack_linears
from engine.models.loader import load_model
from engine.scheduling.continuous import ContinuousScheduler
from engine.text.tokenizer import Tokenizer

WIDTH, BUDGET, ROOM, BLOCK, THREADS = 8, 512, 256, 16, (1, 2)
SLOTS, PAGED, BARE = "slots", "pages, prefix cache on", "pages, prefix cache off"
SHARED, OWN, CROWD = 256, 16, 32


def run(kind: str, model, tokenizer, work, width: int, room: int) -> LLMEngine:
    """An engine with all of `work` queued."""
    if kind == SLOTS:
        memory: SlotMemory | PageMemory = SlotMemory(model.config, width, room)
        cache = memory.plan()
    else:
        memory = pages = PageMemory(model.config, width * room // BLOCK, BLOCK)
        cache = pages.plan(enable_prefix_caching=kind == PAGED)
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
    options = whole_numbers(__doc__.splitlines()[0], repeats=5, requests=128)
    tokenizer = Tokenizer.from_pretrained("storyteller")
    model = load_model("storyteller", transform=partial(pack_linears, rows=WIDTH))
    work = jobs(options.requests, model.config.vocab_size)

    def side(kind: str, threads: int, work: list[Job] = work) -> float:
        torch.set_num_threads(threads)
        return to_the_end(run(kind, model, tokenizer, work, WIDTH, ROOM))[0]

    few = work[: len(work) // 4]
    threads = faster_threads((SLOTS, PAGED, BARE), THREADS, lambda kind, n: side(kind, n, few))
    seconds = rounds({kind: partial(side, kind, n) for kind, n in threads.items()}, options.repeats)
    of_slots = ratios(seconds, SLOTS)

    first: dict[str, list[list[float]]] = {BARE: [], PAGED: []}  # median and worst ms, by round
    said = {}
    for _ in range(options.repeats):
        for kind, found in first.items():
            *waits, said[kind] = crowd(kind, model, tokenizer)
            found.append([wait * 1e3 for wait in waits])
    medians, worst = ({kind: [one[i] for one in found] for kind, found in first.items()} for i in (0, 1))
    sooner, worst_sooner = (quartiles(ratios(ms, PAGED)[BARE])["median"] for ms in (medians, worst))
    figures = {
        "paged_over_slots": quartiles(of_slots[PAGED])["median"],
        "bare_over_slots": quartiles(of_slots[BARE])["median"],
        "seconds": {kind: quartiles(values) for kind, values in seconds.items()},
        "ttft_ms": {kind: quartiles(values) for kind, values in medians.items()},
        "ttft_times_lower": sooner,
        "ttft_worst_times_lower": worst_sooner,
        "same_tokens": said[PAGED] == said[BARE],
    }
    tables = {
        "race": {
            "columns": ["cache", "threads", "seconds", "of slots'"],
            "rows": [
                [kind, threads[kind], middle(seconds[kind]), middle(of_slots[kind])] for kind in seconds
            ],
        },
        "crowd": {
            "columns": [f"{CROWD} requests, {SHARED} tokens shared", "median ms to the first token", "worst"],
            "rows": [[kind, middle(medians[kind]), middle(worst[kind])] for kind in first],
        },
    }
    workload = {
        "requests": options.requests, "prompt_tokens": "8 to 128", "output_tokens": "16 to 128",
        "at once": WIDTH, "room": ROOM, "block_size": BLOCK, "max_num_batched_tokens": BUDGET,
        "repeats": options.repeats, "torch_threads": THREADS,
        "crowd": f"{CROWD} requests, {SHARED} tokens shared, {OWN} own",
    }  # fmt: skip
    show(record("part12_paged", __doc__.splitlines()[0], workload, figures, tables), tables)


if __name__ == "__main__":
    main()
