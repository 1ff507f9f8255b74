"""A snapshot of the engine at work: memory cell by cell, requests, steps; and the bounds of all lists."""

import json
import time
from functools import partial

import pytest

from engine.cache.slots import SlotCache
from engine.decoding.params import SamplingParams
from engine.execution.runner import ModelRunner
from engine.requests.listeners import StepRecord
from engine.scheduling.continuous import ContinuousScheduler
from engine.scheduling.fifo import FIFOScheduler
from engine.telemetry import live_memory, live_view
from engine.telemetry.live_memory import MAX_CELLS, BlocksCopy, TableCopy, copy_memory, copy_table
from engine.telemetry.live_view import LiveView
from tests.part06.conftest import fake_engine as slot_engine  # noqa: F401
from tests.part06.fakes import BlockCache, FakeForward, run_to_end
from tests.part12.pages import fake_engine, paged, reader_of, sequence

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def watched(num_blocks=64, seats=5, budget=24, **options):
    """An engine over pages of 4 tokens, and a view of it that somebody looks at."""
    engine = fake_engine(paged(num_blocks, **options), seats, budget)
    view = LiveView(engine, "fake")
    view.snapshot()
    return engine, view


def read(view: LiveView) -> dict:
    """A snapshot, as a page gets it."""
    return json.loads(json.dumps(view.snapshot().read(), allow_nan=False))


def only(view: LiveView) -> dict:
    (row,) = read(view)["requests"]
    return row


def test_a_request_waits_reads_its_prompt_in_chunks_and_decodes():
    engine, view = watched(budget=8)
    engine.add_request("a", "x" * 12, GREEDY)
    row = only(view)
    assert (row["state"], row["prompt"], row["held"], row["table"]) == ("waiting", 12, 0, [])
    assert (row["blocks"], row["given_back"]) == (0, 0)
    seen = []
    for _ in range(4):
        engine.step()
        row = only(view)
        seen.append((row["state"], row["held"], row["output"], row["now"], row["new"], row["step"]))
    assert seen == [
        ("running", 8, 0, 8, 0, 1),
        ("running", 12, 1, 4, 1, 2),
        ("running", 13, 2, 1, 1, 3),
        ("running", 14, 3, 1, 1, 4),
    ]
    steps = read(view)["steps"]
    assert [(step["number"], step["prompt"], step["output"]) for step in steps] == [
        (1, 8, 0), (2, 4, 0), (3, 0, 1), (4, 0, 1),
    ]  # fmt: skip
    assert {step["budget"] for step in steps} == {8}
    assert row["limit"] == 20
    run_to_end(engine)
    assert read(view)["requests"] == [], "who has ended is gone"


def test_a_table_is_the_caches_and_room_without_tokens_is_counted():
    engine, view = watched()
    engine.add_request("a", "x" * 9, GREEDY)
    engine.step()
    cache = engine.scheduler.cache
    row, memory = only(view), read(view)["memory"]
    assert row["table"] == cache.allocations["a/0"].table.blocks.tolist()
    assert row["blocks"] == len(row["table"]) == 3
    assert (memory["unit"], memory["unit_tokens"]) == ("block", 4)
    assert (memory["tokens_held"], memory["tokens_total"], memory["tokens_unused"]) == (12, 256, 3)
    used = [block for block, count in enumerate(memory["blocks"]["cells"]["used"]) if count]
    assert used == sorted(row["table"])
    run_to_end(engine)


def test_samples_share_their_prompts_blocks_until_they_go_apart():
    engine, view = watched()
    two = SamplingParams(n=2, temperature=1, seed=1, max_tokens=9, ignore_eos=True)
    engine.add_request("a", "x" * 10, two)
    for _ in range(3):
        engine.step()
    snapshot = read(view)
    assert [row["label"] for row in snapshot["requests"]] == ["1.0", "1.1"]
    first, second = (row["table"] for row in snapshot["requests"])
    assert first[:2] == second[:2], "two full blocks hold the prompt of both"
    assert first[2] != second[2]
    blocks = snapshot["memory"]["blocks"]
    assert blocks["shared"] == 2
    assert [blocks["cells"]["references"][block] for block in first[:3]] == [2, 2, 1]
    assert [(event["kind"], event["blocks"]) for event in snapshot["events"]] == [("fork", 1)]
    run_to_end(engine)


def test_what_is_free_and_can_be_found_is_told_from_what_is_empty():
    engine, view = watched()
    engine.add_request("a", "x" * 12, GREEDY)
    run_to_end(engine)
    blocks, cache = read(view)["memory"]["blocks"], engine.scheduler.cache
    assert blocks["used"] == 0
    assert blocks["kept"] == blocks["known"] == len(cache.prefixes) > 0
    engine.add_request("b", "x" * 12 + "y", GREEDY)
    engine.step()
    row, blocks = only(view), read(view)["memory"]["blocks"]
    assert row["cached"] == 12
    assert blocks["kept"] == len(cache.prefixes) - 3, "three blocks are in use again"
    run_to_end(engine)


@pytest.mark.parametrize(("mode", "state"), [("swap", "swapped"), ("recompute", "preempted")])
def test_who_is_preempted_is_shown_to_wait_and_to_come_back(mode, state):
    engine, view = watched(10, num_swap_blocks=10, preemption_mode=mode)
    for name in "ab":
        engine.add_request(name, f"{name} says: ", GREEDY)
    states, kinds, in_swap, again = set(), [], 0, 0
    while engine.has_unfinished_requests():
        engine.step()
        snapshot = read(view)
        states |= {row["state"] for row in snapshot["requests"]}
        in_swap = max(in_swap, snapshot["memory"]["swap"]["used"])
        again += snapshot["steps"][-1]["again"]
        kinds = [event["kind"] for event in snapshot["events"]]
    assert states == {"waiting", "running", state} - {"waiting"} | (states & {"waiting"})
    assert "preempt" in kinds
    assert ("out" in kinds, "in" in kinds) == (mode == "swap", mode == "swap")
    assert (in_swap > 0) == (mode == "swap")
    assert (again > 0) == (mode == "recompute"), "what was lost is computed again, and is no prompt"


@pytest.mark.parametrize("num_blocks", [1, 1023, 1024, 1025, 10_000, 10_001, 1_000_000])
def test_a_page_draws_so_many_cells_and_leaves_out_no_block(num_blocks):
    references = [(block * 7) % 3 for block in range(num_blocks)]
    known = list(range(0, num_blocks, 5))
    blocks = BlocksCopy(references, known).read()
    cells = blocks["cells"]
    assert {len(cells[state]) for state in cells} == {-(-num_blocks // blocks["cell_size"])}
    assert len(cells["used"]) <= MAX_CELLS
    assert blocks["used"] == sum(cells["used"]) == sum(count > 0 for count in references)
    assert blocks["shared"] == sum(cells["shared"]) == sum(count > 1 for count in references)
    assert blocks["known"] == sum(cells["known"]) == len(known)
    assert blocks["kept"] == sum(cells["kept"]) == sum(not references[block] for block in known)
    assert max(cells["references"]) == max(references)
    assert len(json.dumps(blocks)) < 32 * MAX_CELLS


def test_a_table_names_cells_when_cells_stand_for_several_blocks(monkeypatch):
    monkeypatch.setattr(live_memory, "MAX_CELLS", 16)
    monkeypatch.setattr(live_memory, "MAX_TABLE", 2)
    engine, view = watched(64)
    engine.add_request("a", "x" * 60, GREEDY)
    for _ in range(3):
        engine.step()
    row, blocks = only(view), read(view)["memory"]["blocks"]
    assert (blocks["cell_size"], len(blocks["cells"]["used"])) == (4, 16)
    table = engine.scheduler.cache.allocations["a/0"].table.blocks
    assert row["blocks"] == len(table) > 8
    assert row["table"] == list(dict.fromkeys((table // 4).tolist()))[:2], "each cell once, in order, so many"
    run_to_end(engine)


def test_lists_have_bounds_and_the_sums_say_what_there_is(monkeypatch):
    monkeypatch.setattr(live_view, "MAX_RUNNING", 3)
    monkeypatch.setattr(live_view, "MAX_WAITING", 2)
    monkeypatch.setattr(live_view, "MAX_STEPS", 8)
    engine, view = watched(seats=5)
    for number in range(12):
        engine.add_request(f"r{number}", "x" * 4, GREEDY)
    engine.step()
    snapshot = read(view)
    assert (snapshot["running"], snapshot["waiting"]) == (5, 7)
    assert [row["label"] for row in snapshot["requests"]] == ["1", "2", "3", "6", "7"]
    assert snapshot["steps"][-1]["requests"] == 5
    run_to_end(engine)
    snapshot = read(view)
    assert len(snapshot["steps"]) == live_view.MAX_STEPS
    numbers = [step["number"] for step in snapshot["steps"]]
    assert numbers == list(range(numbers[0], numbers[0] + live_view.MAX_STEPS)), "the newest, none left out"


def test_while_nobody_looks_nothing_is_noted():
    engine = fake_engine(paged(10, num_swap_blocks=10, preemption_mode="swap"))
    view = LiveView(engine, "fake")
    for name in "ab":
        engine.add_request(name, f"{name} says: ", GREEDY)
    run_to_end(engine)
    snapshot = read(view)
    assert (snapshot["steps"], snapshot["events"]) == ([], []), "until now nobody has looked"
    assert view._tracked == {}


def test_steps_are_noted_for_a_while_after_a_snapshot_and_no_longer():
    """The view's clock stood still for longer than that, so to speak, when the snapshot was made."""
    engine = fake_engine(paged(64))
    shift = [0.0]
    view = LiveView(engine, "fake", clock=lambda: time.perf_counter() + shift[0])
    engine.add_request("a", "x" * 4, GREEDY)
    view.snapshot()
    engine.step()
    assert [step["number"] for step in read(view)["steps"]] == [1]
    shift[0] = -2 * live_view.KEEP_SECONDS
    view.snapshot()
    shift[0] = 0.0
    for _ in range(3):
        engine.step()
    snapshot = read(view)
    assert snapshot["steps"] == [], "what was noted is old, and steps were left out since"
    engine.step()
    snapshot = read(view)
    assert [(step["number"], step["output"], step["kept"]) for step in snapshot["steps"]] == [(5, 1, 0)]
    run_to_end(engine)


def test_of_the_drafts_of_a_step_those_that_stood_are_told_from_the_others():
    """A step by hand: its request had one token of output, and has three more of four rows."""
    engine, view = watched()
    engine.add_request("a", "x" * 4, GREEDY)
    engine.step()
    (request,) = engine.scheduler.running
    for _ in range(3):
        request.confirm(7, time.perf_counter())
    view.on_step(
        StepRecord(
            number=2, start=0.0, end=0.0, schedule_seconds=0.0, execute_seconds=0.0, request_ids=("a/0",),
            tokens_computed=(4,), tokens_cached=(0,), tokens_held=(8,), num_running=1, num_waiting=0,
        )
    )  # fmt: skip
    row, step = only(view), read(view)["steps"][-1]
    assert (row["now"], row["checked"], row["new"]) == (4, 3, 3)
    assert (step["output"], step["kept"], step["refused"], step["prompt"]) == (1, 2, 1, 0)
    engine.abort_request("a")


def test_a_failed_step_is_marked_and_has_no_words():
    engine, view = watched()
    engine.add_request("a", "x" * 4, GREEDY)
    reader_of(engine).fail_next = RuntimeError("/home/somebody/secret")
    engine.step()
    snapshot = read(view)
    assert [step["failed"] for step in snapshot["steps"]] == [True]
    assert "secret" not in json.dumps(snapshot)


def test_a_snapshot_has_no_text_and_no_id_of_a_client():
    engine, view = watched()
    engine.add_request("my-own-id", "sesame", GREEDY, cache_salt="salt-of-mine")
    for _ in range(4):
        engine.step()
    said = json.dumps(read(view))
    assert "my-own-id" not in said
    assert "sesame" not in said
    assert "salt" not in said
    run_to_end(engine)


def test_who_came_before_the_view_counts_and_is_not_drawn():
    engine = fake_engine(paged(64))
    engine.add_request("early", "x" * 4, GREEDY)
    engine.step()
    view = LiveView(engine, "fake")
    view.snapshot()
    engine.add_request("late", "x" * 4, GREEDY)
    engine.step()
    snapshot = read(view)
    assert snapshot["running"] == 2
    assert [row["label"] for row in snapshot["requests"]] == ["1"]
    assert snapshot["steps"][-1]["requests"] == 2
    run_to_end(engine)


def test_an_engine_with_slots_shows_slots(slot_engine):  # noqa: F811
    cache = SlotCache(3, 200)

    class Answers:
        """A way that always chooses token 7."""

        def fits(self, batch):
            return True

        def __call__(self, batch):
            import torch

            from engine.execution.runner import Logits

            logits = torch.zeros(len(batch.rows.chosen), 257)
            logits[:, 7] = 1
            return Logits(logits)

    scheduler = partial(ContinuousScheduler, max_num_seqs=3, max_num_batched_tokens=24)
    engine = slot_engine(scheduler, cache, executor=ModelRunner([Answers()]))
    view = LiveView(engine, "fake")
    view.snapshot()
    engine.add_request("a", "x" * 10, GREEDY)
    engine.step()
    row, memory = only(view), read(view)["memory"]
    assert (row["blocks"], row["table"]) == (1, [0])
    assert (memory["unit"], memory["unit_tokens"], memory["swap"]) == ("slot", 200, None)
    assert memory["blocks"]["cells"]["used"] == [1, 0, 0]
    assert memory["tokens_unused"] == 190
    run_to_end(engine)


def test_an_engine_with_another_cache_and_no_budget_shows_what_it_has(slot_engine):  # noqa: F811
    cache = BlockCache(num_blocks=64, block_tokens=16)
    engine = slot_engine(FIFOScheduler, cache, executor=ModelRunner([FakeForward(cache)]))
    view = LiveView(engine, "fake")
    view.snapshot()
    engine.add_request("a", "x" * 10, GREEDY)
    engine.step()
    snapshot = read(view)
    assert (snapshot["budget"], snapshot["seats"]) == (None, None)
    memory = snapshot["memory"]
    assert (memory["unit"], memory["blocks"], memory["tokens_total"]) == ("token", None, 1024)
    assert snapshot["steps"][-1]["budget"] is None
    run_to_end(engine)


def test_a_slot_is_held_by_one_sequence_and_cells_may_stand_for_several_slots(monkeypatch):
    monkeypatch.setattr(live_memory, "MAX_CELLS", 2)
    cache = SlotCache(3, 200)
    gone, second, third = sequences = [sequence(name, "x" * 10) for name in "abc"]
    for number, request in enumerate(sequences):
        cache.admit(request)
        request.num_computed_tokens = 10 * number
    cache.release(gone)
    memory = copy_memory(cache, [second, third])
    assert (memory.unit, memory.unit_tokens) == ("slot", 200)
    assert (memory.tokens_held, memory.tokens_total, memory.tokens_unused) == (400, 600, 370)
    assert memory.blocks == BlocksCopy([0, 1, 1], []), "a slot has one owner, and nobody finds its tokens"
    assert memory.blocks.read()["cells"]["used"] == [1, 1]
    assert memory.swap is None
    assert [copy_table(cache, request) for request in sequences] == [
        TableCopy(0, 0, []), TableCopy(1, 0, [0]), TableCopy(1, 0, [1]),
    ]  # fmt: skip


def test_of_another_cache_the_totals_are_known_and_no_places():
    cache, request = BlockCache(num_blocks=64, block_tokens=16), sequence("a", "x" * 10)
    cache.admit(request)
    cache.reserve(request, 20)
    request.num_computed_tokens = 10
    memory = copy_memory(cache, [request])
    assert (memory.unit, memory.unit_tokens) == ("token", 1)
    assert (memory.tokens_held, memory.tokens_total, memory.tokens_unused) == (32, 1024, 22)
    assert (memory.blocks, memory.swap) == (None, None)
    assert copy_table(cache, request) == TableCopy(0, 0, [])


@pytest.mark.parametrize("make", [partial(BlockCache, 64, 4), partial(paged, 64)], ids=["totals", "pages"])
def test_memory_that_is_full_to_its_last_token_has_no_room_left(make):
    cache, request = make(), sequence("a", "x" * 10)
    cache.admit(request)
    cache.reserve(request, 8)
    unused = []
    for request.num_computed_tokens in (7, 8, 9):
        unused.append(copy_memory(cache, [request]).tokens_unused)
    assert unused == [1, 0, 0], "room for 8 tokens: none is left with the eighth, and never less than none"
