"""What the live view shows of whole engines: pages, slots, steps ahead, drafts, adapters, little memory."""

import json
from pathlib import Path

import pytest

from engine import LLM, SamplingParams
from engine.speculation.capability import Speculation
from engine.speculation.measuring import ALWAYS_DRAFT
from engine.telemetry import live_view
from engine.telemetry.live_view import LiveView
from tests.part06.fakes import Recorder

ADAPTERS = Path(__file__).parents[2] / "adapters"
PROMPTS = [
    "Once upon a time",
    "The dog saw the cat. The dog saw the",
    "Lily had a red ball and Tom had a red ball",
]
DRAFTS = {"num_speculative_tokens": 3, "step_times": ALWAYS_DRAFT.as_dict()}  # in every step
MODEL_DRAFTS = DRAFTS | {"model": "storyteller-draft"}
LITTLE = {"kv_cache_memory_bytes": 2_000_000, "max_model_len": 96, "max_num_seqs": 3}
OPTIONS = {
    "pages": {},
    "slots": {"kv_cache": "slots"},
    "one step ahead": {"async_scheduling": True},
    "n-grams": {"speculative_config": DRAFTS | {"method": "ngram"}},
    "draft model": {"speculative_config": MODEL_DRAFTS},
    "draft model, one step ahead, slots": {
        "speculative_config": MODEL_DRAFTS, "async_scheduling": True, "kv_cache": "slots",
    },
    "little memory": LITTLE,
    "little memory, swapping": LITTLE | {"swap_space": 0.01, "preemption_mode": "swap"},
    "small steps": {"max_num_batched_tokens": 7, "max_num_seqs": 3},
}  # fmt: skip


@pytest.fixture(autouse=True)
def patient(monkeypatch) -> None:
    """A step is noted however long it takes: the first may compile C, on a busy machine."""
    monkeypatch.setattr(live_view, "KEEP_SECONDS", 600.0)


def look(view: LiveView) -> dict:
    return json.loads(json.dumps(view.snapshot().read(), allow_nan=False))


@pytest.mark.parametrize("name", OPTIONS)
def test_a_view_of_each_step_has_the_steps_tokens_and_the_drafts_that_stood(name):
    engine = LLM("storyteller", seed=0, **OPTIONS[name]).engine
    view, recorder = LiveView(engine, "storyteller"), Recorder()
    engine.listeners.add(recorder)
    look(view)
    for number, prompt in enumerate(PROMPTS * 2):
        n = 1 + number % 2
        params = SamplingParams(n=n, temperature=1 if n > 1 else 0, max_tokens=24, ignore_eos=True)
        engine.add_request(str(number), prompt, params)
    steps = {}
    while engine.has_unfinished_requests():
        engine.step()
        snapshot = look(view)
        steps |= {step["number"]: step for step in snapshot["steps"]}
        memory = snapshot["memory"]
        assert 0 <= memory["tokens_held"] <= memory["tokens_total"]
        for row in snapshot["requests"]:
            assert row["held"] <= row["prompt"] + row["output"]
            assert (row["state"] == "running") == (row["blocks"] > 0)
    assert list(steps) == [record.number for record in recorder.records]
    kinds = ("prompt", "again", "output", "kept", "refused")
    for record in recorder.records:
        assert sum(steps[record.number][kind] for kind in kinds) == sum(record.tokens_computed)
    kept, refused = (sum(step[kind] for step in steps.values()) for kind in ("kept", "refused"))
    tallies = [one.tally for one in engine.capabilities if isinstance(one, Speculation)]
    assert (kept, kept + refused) == (
        sum(tally.accepted for tally in tallies), sum(tally.proposed for tally in tallies)
    )  # fmt: skip
    assert ("speculative_config" in OPTIONS[name]) == (kept > 0)
    assert view._tracked == {}, "nothing is left of them"


def test_an_adapter_is_named():
    engine = LLM("storyteller", enable_lora=True).engine
    from engine import LoRARequest

    view = LiveView(engine, "storyteller")
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    engine.add_request("a", "When I", params, adapter=LoRARequest("poetry", 1, ADAPTERS / "poetry"))
    engine.step()
    (row,) = look(view)["requests"]
    assert row["adapter"].startswith("poetry")
    engine.abort_request("a")
