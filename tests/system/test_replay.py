"""`--record FILE` and `ruvon replay FILE`: what ran is run again, and a difference is found."""

import copy
import json
from pathlib import Path

import pytest
import typer

from engine import LLM, LoRARequest, SamplingParams
from engine.cli.replay import replay as command
from engine.requests.wire import from_json, to_bytes
from engine.speculation.measuring import ALWAYS_DRAFT
from engine.wiring import replay as wiring
from engine.wiring.devices import load_devices
from engine.wiring.replay import replay
from tests.system.recordings import LILY, PROMPTS, batches, lines_of, write
from tests.system.test_adapters import ADAPTERS

PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=1, seed=5, max_tokens=24, top_k=9),
    SamplingParams(temperature=0.8, n=3, max_tokens=12, repetition_penalty=1.3, min_tokens=4),
]


TOKEN_BYTES = 2 * 6 * 256 * 4  # keys and values, layers, width, fp32


DRAFT = {
    "model": Path(__file__).parents[2] / "engine/zoo/storyteller-draft",
    "num_speculative_tokens": 3,
    "step_times": ALWAYS_DRAFT.as_dict(),  # something is proposed in every step
}


@pytest.mark.parametrize(
    ("options", "happened"),
    [
        ({}, lambda lines: any(copied["kind"] == "fork" for b in batches(lines) for copied in b["copies"])),
        (
            {"kv_cache": "slots", "max_num_seqs": 3},
            lambda lines: [[2]] in [b["tables"][-1:] for b in batches(lines)],
        ),
        (
            {"max_num_batched_tokens": 32, "max_num_seqs": 4},
            lambda lines: any(0 in b["rows"]["chosen_counts"] for b in batches(lines)),
        ),
        (
            {"async_scheduling": True},
            lambda lines: any(-1 in b["token_ids"] for b in batches(lines)),
        ),
        ({"speculative_config": DRAFT}, lambda lines: any(line.get("runner") == "draft" for line in lines)),
        (
            {"speculative_config": DRAFT, "async_scheduling": True, "kv_cache": "slots"},
            lambda lines: any(max(b["rows"]["chosen_counts"]) > 1 for b in batches(lines)),
        ),
        (
            {"enable_lora": True, "max_loras": 2},
            lambda lines: any(max(b["adapters"]) == 0 for b in batches(lines)),
        ),
        (
            {"enable_lora": True, "max_loras": 1, "async_scheduling": True},
            lambda lines: [line["adapter"] for line in lines if "adapter" in line] == [0, 0],
        ),
        (
            {
                "kv_cache_memory_bytes": 160 * TOKEN_BYTES,
                "max_model_len": 160,
                "swap_space": 0.02,
                "preemption_mode": "swap",
            },
            lambda lines: {c["kind"] for b in batches(lines) for c in b["copies"]} >= {"in", "out"},
        ),
    ],
    ids=[
        "pages",
        "slots",
        "chunks",
        "one step ahead",
        "draft",
        "draft ahead",
        "adapter",
        "slots of adapters",
        "swapping",
    ],
)
def test_a_recorded_run_replays_equal(options, happened, tmp_path):
    file = tmp_path / "run.jsonl"
    poetry = LoRARequest("poetry", 1, ADAPTERS / "poetry")
    business = LoRARequest("business", 2, ADAPTERS / "business")
    adapter = {None: None, 2: poetry, 1: [poetry, business, None]}[options.get("max_loras")]
    llm = LLM("storyteller", record=file, **options)
    llm.generate(PROMPTS, PARAMS, use_tqdm=False, lora_request=adapter)
    lines = lines_of(file)
    assert happened(lines), "the run was to have more in it"
    for batch in batches(lines):
        assert json.loads(to_bytes(from_json(batch))) == batch, "a record is read as it was written"
    again = list(replay(file))
    assert len(again) == sum("result" in line for line in lines) > 20
    assert all(compared.is_equal and compared.error_now is None for compared in again)


def test_a_long_replay_keeps_no_more_than_the_drafts_of_a_step(tmp_path, monkeypatch):
    """What drafts were drawn from is vocab_size numbers each, on the device."""
    file, seats = tmp_path / "run.jsonl", 2
    llm = LLM("storyteller", record=file, max_num_seqs=seats, max_model_len=64, speculative_config=DRAFT)
    llm.generate([LILY] * 3 * seats, SamplingParams(temperature=1, max_tokens=4), use_tqdm=False)
    loaded = []
    monkeypatch.setattr(wiring, "load_devices", lambda args: loaded.append(load_devices(args)) or loaded[0])
    kept = [len(loaded[0].runner.select.draft_probs._probs) for _ in replay(file)]
    assert 0 < max(kept) <= seats


def test_the_command_says_that_all_is_as_recorded(recorded, capsys):
    command(recorded)
    assert "4 steps, 8 tokens: all as recorded" in capsys.readouterr().out


def test_the_model_may_be_elsewhere(recorded, devices, monkeypatch):
    loaded = []
    monkeypatch.setattr(wiring, "load_devices", lambda args: loaded.append(args.model) or devices)
    for model in (None, "elsewhere"):
        assert all(compared.is_equal for compared in replay(recorded, model))
    assert loaded == ["storyteller", "elsewhere"]


def test_tokens_that_differ_are_found_with_their_step_and_sequence(recorded, tmp_path, capsys):
    lines = lines_of(recorded)
    third = next(line for line in lines if line.get("result") == 3)
    tokens = copy.deepcopy(third["tokens"])
    third["tokens"][1] = [7]
    with pytest.raises(typer.Exit) as exited:
        command(write(tmp_path / "other.jsonl", lines))
    assert exited.value.exit_code == 1
    said = capsys.readouterr().out
    assert "step 3 (model) differs, the first of 4" in said
    assert said.splitlines()[1:] == [f"  1/0: recorded [7], now {tokens[1]}"], "the other one is as it was"


def test_a_step_that_failed_is_told_of_and_commands_no_terminal(recorded, tmp_path, capsys):
    lines = lines_of(recorded)
    lines[-1] = {"result": lines[-1]["result"], "error": "\x1b[2Jgone"}
    command(write(tmp_path / "failed.jsonl", lines))
    captured = capsys.readouterr()
    assert "step 4: failed when it was recorded" in captured.err
    assert "\x1b" not in captured.err
