"""What do pages cost beside slots, and what does the reader in C gain?

    python -m benchmarks.part12_table [--repeats 5] [--requests 128]       # on a quiet machine

Part 8's workload on `storyteller`, 8 at once, one thread, nothing shared. Slots read by `Ragged`; pages read
by `Ragged`; pages read by page_reader.c. Between the first two the memory differs (its layout, its table, and
what the host does for it), between the last two the reader alone. All sides take turns in each round.
"""

import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.part12_paged import BLOCK, BUDGET, ROOM, WIDTH, to_the_end
from benchmarks.record import middle, record, show, whole_numbers
from benchmarks.workloads import Job, jobs, ratios, rounds
from engine.attention import page_reader
from engine.attention.paged import MakeDecodePlan, paged_decode, ragged
from engine.cache.memory import PageMemory
from engine.cache.slots import SlotMemory
from engine.core.llm_engine import LLMEngine
from engine.decoding.params import SamplingParams
from engine.execution.runner import EagerWay, ModelRunner
from engine.layers.packed_linear import pack_linears
from engine.models.loader import load_model
from engine.scheduling.continuous import ContinuousScheduler
from engine.text.tokenizer import Tokenizer

SIDES: dict[str, MakeDecodePlan | None] = {
    "slots, read by `Ragged`": None,
    "pages, read by `Ragged`": ragged,
    "pages, read in C": paged_decode,
}


def seconds(
    decode: MakeDecodePlan | None, model: torch.nn.Module, tokenizer: Tokenizer, work: list[Job]
) -> float:
    """Seconds for all of `work` over pages that `decode` reads, or over slots (None)."""
    if decode is None:
        slots = SlotMemory(model.config, WIDTH, ROOM)
        memory, cache = slots, slots.plan()
    else:
        pages = PageMemory(model.config, WIDTH * ROOM // BLOCK, BLOCK, decode=decode)
        memory, cache = pages, pages.plan(enable_prefix_caching=False)
    runner = ModelRunner([EagerWay(model, memory)], memory)
    scheduler = ContinuousScheduler(cache, WIDTH, BUDGET)
    engine = LLMEngine(tokenizer, model.config, scheduler, runner, max_model_len=ROOM)
    for i, (prompt, tokens) in enumerate(work):
        engine.add_request(str(i), prompt, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
    return to_the_end(engine)[0]


def main() -> None:
    options = whole_numbers(__doc__.splitlines()[0], repeats=5, requests=128)
    assert page_reader.is_available(), "needs a C compiler: without one, two of the sides are the same"
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_pretrained("storyteller")
    model = load_model("storyteller", transform=partial(pack_linears, rows=WIDTH))
    work = jobs(options.requests, model.config.vocab_size)
    sides = {name: partial(seconds, decode, model, tokenizer, work) for name, decode in SIDES.items()}
    rounds(sides, 1)  # warm
    measured = rounds(sides, options.repeats)
    of_slots = ratios(measured, next(iter(SIDES)))
    rows = [[name, middle(values), middle(of_slots[name])] for name, values in measured.items()]
    tables = {"table": {"columns": ["cache and reader", "seconds", "of slots'"], "rows": rows}}
    workload = {
        "requests": options.requests, "at once": WIDTH, "room": ROOM, "block_size": BLOCK,
        "max_num_batched_tokens": BUDGET, "rounds": options.repeats, "torch_threads": 1,
    }  # fmt: skip
    show(record("part12_table", __doc__.splitlines()[0], workload, {"seconds": measured}, tables), tables)


if __name__ == "__main__":
    main()
