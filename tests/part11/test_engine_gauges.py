"""What an engine's metrics say of the present: gauges, caches, memory, several engines, several readers."""

import threading
from dataclasses import replace
from functools import partial

import pytest
import torch

from engine.decoding.params import SamplingParams
from engine.execution.runner import ModelRunner
from engine.scheduling.continuous import ContinuousScheduler
from engine.scheduling.fifo import FIFOScheduler
from engine.telemetry.metrics import EngineMetrics
from tests.part06.fakes import BlockCache, FakeForward, run_to_end

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SEVERAL = partial(ContinuousScheduler, max_num_seqs=4, max_num_batched_tokens=16)


def test_gauges_tell_of_now_also_between_steps(measured):
    engine, _, read = measured(FIFOScheduler, BlockCache(num_blocks=20, block_tokens=16))
    gauges = lambda: [read(f"vllm:num_requests_{kind}") for kind in ("running", "waiting")]  # noqa: E731
    assert gauges() == [0, 0]
    engine.add_request("a", "x" * 30, GREEDY)
    engine.add_request("b", "prompt", GREEDY)
    assert gauges() == [0, 2]
    engine.step()
    assert gauges() == [1, 1]
    assert read("vllm:kv_cache_usage_perc") == pytest.approx(2 / 20)
    engine.abort_request("b")
    assert gauges() == [1, 0]
    engine.abort_request("a")  # nothing will step any more
    assert gauges() == [0, 0]
    assert read("vllm:kv_cache_usage_perc") == 0


def test_what_a_cache_had_is_a_hit(measured):
    class Remembers(BlockCache):
        """Has the first two tokens of every prompt, as far as its answer goes."""

        def admit(self, seq):
            super().admit(seq)
            self.tokens[seq.id] = list(seq.token_ids[:2])
            return 2

    engine, _, read = measured(cache=Remembers(64, 16))
    engine.add_request("a", "prompt", GREEDY)
    run_to_end(engine)
    assert read("vllm:prefix_cache_queries_total") == 6
    assert read("vllm:prefix_cache_hits_total") == 2


def test_what_an_executor_tells_is_added_up(measured):
    class Talks(ModelRunner):
        def submit(self, batch):
            pending = super().submit(batch)

            class Told:
                def result(self):
                    return replace(pending.result(), counters={"drafts": 3, "accepted": 0.5})

            return Told()

    cache = BlockCache(64, 16)
    engine, _, read = measured(cache=cache, executor=Talks([FakeForward(cache)]))
    engine.add_request("a", "prompt", GREEDY)
    run_to_end(engine)
    assert read("ruvon:executor_total", counter="drafts") == 18
    assert read("ruvon:executor_total", counter="accepted") == 3


def test_of_gpus_only_those_in_use_are_asked_for_their_memory(measured, monkeypatch):
    asked = []

    def mem_get_info(index):
        asked.append(index)
        return 3, 10

    for name, value in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 2,
        "memory_reserved": lambda index: 5 * index,  # the first holds nothing of ours
        "mem_get_info": mem_get_info,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    _, metrics, read = measured()
    asked.clear()
    assert read("ruvon:gpu_memory_used_bytes", device="cuda:1") == 7
    assert asked == [1], "once for both numbers: they are of one moment"
    assert read("ruvon:gpu_memory_total_bytes", device="cuda:1") == 10
    assert read("ruvon:gpu_memory_used_bytes", device="cuda:0") is None
    assert metrics.snapshot()["now"]["gpus"] == [{"device": "cuda:1", "used": 7, "total": 10}]
    assert set(asked) == {1}, "asking a GPU for its memory opens it"


def test_memory_of_the_host_is_told(measured):
    _, metrics, read = measured()
    total = read("ruvon:host_memory_total_bytes")
    assert total > 2**28
    now = metrics.snapshot()["now"]
    assert now["memory_total"] == total
    assert now["memory"] is None or 0 < now["memory"] < total


def test_what_a_system_does_not_say_of_its_memory_is_left_out(measured, monkeypatch):
    """As on Windows, which has no such function at all."""
    monkeypatch.delattr("os.sysconf")
    _, metrics, read = measured()
    assert read("ruvon:host_memory_total_bytes") is None
    assert metrics.snapshot()["now"]["memory_total"] is None


def test_two_engines_in_a_process_share_nothing(measured):
    one, _, read_one = measured()
    _, _, read_two = measured()
    one.add_request("a", "prompt", GREEDY)
    run_to_end(one)
    assert read_one("vllm:generation_tokens_total") == 6
    assert read_two("vllm:generation_tokens_total") == 0


def test_a_request_that_was_there_before_is_left_out(fake_engine):
    engine = fake_engine()
    engine.add_request("a", "prompt", GREEDY)
    engine.step()
    metrics = EngineMetrics(engine, "fake")
    run_to_end(engine)
    assert metrics.counters["vllm:generation_tokens"] == 0
    assert metrics.counters["ruvon:steps"] == 5
    assert sum(metrics.succeeded.values()) == 0


def test_whoever_reads_in_another_thread_gets_numbers_of_one_moment(measured):
    engine, metrics, _ = measured(SEVERAL)
    for i in range(40):
        engine.add_request(str(i), "prompt", replace(GREEDY, max_tokens=30))
    torn, done = [], threading.Event()

    def read():
        while not done.is_set():
            found = {family.name: family.samples for family in metrics.collect()}
            steps = found["ruvon:steps"][0].value
            observed = [s.value for s in found["ruvon:step_seconds"] if s.name.endswith("_count")]
            snapshot = metrics.snapshot()
            torn.append([steps] != observed or snapshot["totals"]["ruvon:steps"] < steps)

    reader = threading.Thread(target=read)
    reader.start()
    run_to_end(engine)
    done.set()
    reader.join(40)
    assert not any(torn)


def test_the_snapshot_adds_up_and_is_bounded(measured):
    engine, metrics, _ = measured(SEVERAL)
    for i in range(5):
        engine.add_request(str(i), "prompt", GREEDY)
    run_to_end(engine)
    metrics.history.start -= 2  # two seconds have passed
    metrics.started -= 2
    snapshot = metrics.snapshot()
    assert snapshot["model_name"] == "fake"
    assert snapshot["totals"]["vllm:generation_tokens"] == 30
    assert snapshot["ended"] == {"length": 5, "stop": 0, "abort": 0, "error": 0, "reject": 0}
    assert snapshot["now"]["running"] == snapshot["now"]["waiting"] == 0
    assert snapshot["buckets"]["ttft"]["cumulative"][-1] == 5
    assert {len(column) for name, column in snapshot["seconds"].items() if isinstance(column, list)} == {
        len(snapshot["seconds"]["second"])
    }
