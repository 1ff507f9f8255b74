"""A step's record says everything: written to bytes, it gives the same tokens where nobody saw a request."""

import json
from dataclasses import fields, replace

import numpy as np
import pytest

from engine import LLM, EngineArgs, SamplingParams
from engine.lora.adapter import read_adapter
from engine.requests.batch import Batch
from engine.requests.request import Request
from engine.requests.wire import from_bytes, to_bytes
from engine.speculation.measuring import ALWAYS_DRAFT
from engine.wiring.compose import build_engine
from engine.wiring.devices import load_devices
from tests.system.ready import ROOT

BLOCK, SEATS = 16, 6
ARGS = EngineArgs(
    model="storyteller", device="cpu", max_num_seqs=SEATS, max_num_batched_tokens=24, max_model_len=160,
    enable_lora=True, max_loras=2, swap_space=0.02, preemption_mode="swap", async_scheduling=True,
    speculative_config={
        "model": "storyteller-draft", "num_speculative_tokens": 3, "step_times": ALWAYS_DRAFT.as_dict(),
    },
)  # fmt: skip
ADAPTERS = {"poetry": ROOT / "adapters/poetry", "business": ROOT / "adapters/business"}
PARK = "One day, Lily went to the park with her mom. They saw a big tree and a little bird. "
ASKED = [
    ("Once upon a time, there was a dog. The dog", {"temperature": 0}, None),
    (2 * PARK, {"temperature": 0.9, "n": 3, "seed": 5}, None),
    ("Tom had a ball. He", {"temperature": 0.8, "logprobs": 2, "prompt_logprobs": 1}, "poetry"),
    ("The sun was", {"temperature": 0, "repetition_penalty": 1.3, "min_tokens": 20}, "business"),
    ("Once upon a time, there was a dog. The dog", {"temperature": 1.0}, None),
    ("A bird", {"temperature": 0.7, "logit_bias": {300: 2.0}, "top_k": 40, "min_p": 0.02}, None),
    ("The dog", {"temperature": 0, "bad_words": ["park", "was", "a tree"]}, None),
    ("A bird", {"temperature": 0.7, "allowed_token_ids": list(range(300, 3000))}, None),
]


class Noted:
    """An executor whose records are kept as bytes, with the tokens that came of them."""

    def __init__(self, executor, name: str, log: list) -> None:
        self.executor, self.name, self.log = executor, name, log

    def submit(self, batch):
        entry = [self.name, to_bytes(batch), None]
        self.log.append(entry)
        return Result(self.executor.submit(batch), entry)


class Result:
    def __init__(self, pending, entry) -> None:
        self.pending, self.entry = pending, entry

    def result(self):
        result = self.pending.result()
        self.entry[2] = result
        return result


@pytest.fixture(scope="module")
def run():
    """(what was submitted, in order; the outputs; bytes; adapters by slot) of one mixed run over little
    memory.
    """
    probe = load_devices(ARGS)
    per_block = probe.args.kv_cache_memory_bytes // probe.memory.num_blocks
    engine = build_engine(replace(ARGS, kv_cache_memory_bytes=22 * per_block))
    log: list = []
    engine.executor = Noted(engine.executor, "model", log)
    speculation, *_ = engine.capabilities
    speculation.proposer.runner = Noted(speculation.proposer.runner, "draft", log)
    for name, folder in ADAPTERS.items():
        engine.adapters.load(name, read_adapter(folder, engine.config))
    in_slot = {}
    engine.adapters.slots.on_assign.append(in_slot.__setitem__)
    for i, (prompt, params, adapter) in enumerate(ASKED):
        asked = SamplingParams(max_tokens=60, **({"seed": i} | params))
        engine.add_request(str(i), prompt, asked, adapter=adapter)
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step() if output.finished}
    assert not any(output.error for output in outputs.values())
    return log, outputs, 22 * per_block, in_slot


def test_the_run_has_all_that_a_step_may_have(run):
    batches = [from_bytes(data) for name, data, _ in run[0] if name == "model"]
    kinds = {copy.kind for batch in batches for copy in batch.copies}
    assert kinds == {"fork", "out", "in"}, "blocks were forked, swapped out and swapped in"
    assert any(batch.has_drafts for batch in batches)
    assert any(0 in batch.rows.chosen_counts for batch in batches), "a prompt came in chunks"
    assert {slot for batch in batches for slot in batch.adapters} == {-1, 0, 1}
    assert any(batch.rows.logprobs for batch in batches)
    assert any(batch.rows.prompt_rows for batch in batches)
    draws = [row for batch in batches for row in batch.draws.rows]
    assert any(row.is_adjusted for row in draws)
    assert any(row.bad_ids for row in draws)
    assert any(row.mask is not None for row in draws)


def test_a_runner_that_never_saw_a_request_computes_the_same_from_the_bytes(run):
    log, _, memory, in_slot = run
    devices = load_devices(replace(ARGS, kv_cache_memory_bytes=memory))
    assert len(in_slot) == len(ADAPTERS), "each has a slot to the end"
    for slot, adapter in in_slot.items():
        devices.slots.write(slot, adapter)
    runners = {"model": devices.runner, "draft": devices.draft_runner}
    for number, (name, data, want) in enumerate(log):
        got = runners[name].submit(from_bytes(data)).result()
        if want is None:  # launched on top of one that failed, or never read
            continue
        assert got.tokens == want.tokens, f"step {number}, by the {name}'s runner"
        assert got.logprobs == want.logprobs
        assert got.prompt_logprobs == want.prompt_logprobs


def test_bytes_say_the_same_as_the_record(run):
    for _, data, _ in run[0]:
        assert to_bytes(from_bytes(data)) == data


def test_a_record_holds_numbers_and_names_alone(run):
    """No request, no tensor: JSON says all of it."""
    assert Request not in {spec.type for spec in fields(Batch)}
    batch = from_bytes(run[0][0][1])
    assert isinstance(batch.tables, np.ndarray)
    assert set(json.loads(run[0][0][1])) == {spec.name for spec in fields(Batch)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"slots": []}, "slots: 0, where"),
        ({"ids": ["a", "b", "c"]}, "query_start: 3, where 4"),
        ({"tables": "x"}, "no record of a step"),
        ({"nothing": 1}, "no record of a step: TypeError"),
        ({"rows": {}}, "no record of a step"),
    ],
)
def test_what_is_no_record_is_refused_in_words(run, change, words):
    given = json.loads(run[0][0][1]) | change
    with pytest.raises(ValueError, match=words):
        from_bytes(json.dumps(given))


@pytest.mark.parametrize("where", ["", "no/such/folder/file", "file/below"])
def test_what_cannot_be_written_is_refused_before_a_model_is_loaded(where, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="record=") as refusal:
        LLM("no-such-model", record=tmp_path / where)
    assert "\n" not in str(refusal.value)
