"""`--record FILE` and `ruvon replay FILE`: what ran is run again, and what is no recording is refused."""

import copy
import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from engine import LLM, LoRARequest, SamplingParams
from engine.cli.replay import replay as command
from engine.execution.recording import Bounds, Compared
from engine.requests.wire import from_json, to_bytes
from engine.speculation.measuring import ALWAYS_DRAFT
from engine.wiring import replay as wiring
from engine.wiring.devices import Devices, load_devices
from engine.wiring.replay import args_of, replay
from tests.system.test_adapters import ADAPTERS

LILY = "Once upon a time, there was a little girl named Lily. She had a"
PROMPTS = [LILY, "The cat", "Once upon a time, there " * 20]
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


def lines_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def write(file: Path, lines: list[dict | str]) -> Path:
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return file


def about(**args) -> dict:
    """A first line."""
    return {"about": {"args": {"model": "storyteller", "device": "cpu"} | args}}


def batches(lines: list[dict]) -> list[dict]:
    return [line["batch"] for line in lines if "batch" in line]


# --- what ran is run again ----------------------------------------------------------------------------------


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
            lambda lines: any(0 in b["rows"]["counts"] for b in batches(lines)),
        ),
        (
            {"async_scheduling": True},
            lambda lines: any(-1 in b["token_ids"] for b in batches(lines)),
        ),
        ({"speculative_config": DRAFT}, lambda lines: any(line.get("runner") == "draft" for line in lines)),
        (
            {"speculative_config": DRAFT, "async_scheduling": True, "kv_cache": "slots"},
            lambda lines: any(max(b["rows"]["counts"]) > 1 for b in batches(lines)),
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


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    """A recording of a few steps, two sequences in each, on pages and with penalties."""
    file = tmp_path_factory.mktemp("recording") / "run.jsonl"
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=1, repetition_penalty=1.2)
    llm = LLM("storyteller", record=file, max_num_seqs=2, max_model_len=64, max_num_batched_tokens=32)
    llm.generate(PROMPTS[:2], params, use_tqdm=False)
    return file


@pytest.fixture(scope="module")
def devices(recorded) -> Devices:
    return load_devices(args_of(recorded))


@pytest.fixture
def quick(devices, monkeypatch):
    """What computes is made once: it is the same for all recordings here."""
    monkeypatch.setattr(wiring, "load_devices", lambda args: devices)


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


# --- what is no recording -----------------------------------------------------------------------------------


def refused(file: Path) -> str:
    """What the command says, in one line."""
    with pytest.raises(SystemExit) as exited:
        command(file)
    said = exited.value.code
    assert isinstance(said, str)
    assert said.startswith("ruvon replay: ")
    assert said.isprintable()
    return said


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], "first line"),
        (["not JSON"], "first line"),
        (["[1]"], "first line"),
        (['{"choices": []}'], "first line"),
        (["[" * 100_000], "first line"),
        (["\x00\xff"], "first line"),
        ([about(max_loras=10**30)], "line 1: "),
        ([about(max_num_seqs=10**13)], "line 1: "),
        ([about(max_num_seqs="9")], "line 1: "),
        ([{"about": {"args": {}}}], "first line"),
        ([{"about": {"args": {"model": {}}}}], "first line"),
        ([about(kv_cache_memory_bytes=10**17)], "line 1: "),
        ([about(kv_cache_memory_bytes=1e400)], "line 1: "),
    ],
)
def test_a_file_that_does_not_say_how_its_engine_was_made(lines, says, tmp_path):
    assert says in refused(write(tmp_path / "file", lines))


def test_no_file_and_a_folder(tmp_path):
    assert "No such file" in refused(tmp_path / "none")
    assert "directory" in refused(tmp_path)


def test_what_a_recording_says_of_recording_is_not_done(recorded, tmp_path):
    """Whoever sends a recording names no file that is written."""
    lines = lines_of(recorded)
    lines[0]["about"]["args"]["record"] = str(tmp_path / "written")
    file = write(tmp_path / "file", lines)
    command(file)
    assert not (tmp_path / "written").exists()
    assert args_of(file).record is None


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "not JSON"),
        ('{"step": 1, "runner": "model", "batch": {"ids": ["a"', "not JSON"),
        ("\x00\x01", "not JSON"),
        ("[" * 100_000 + "]" * 100_000, "nested"),
        ('{"step": 1, "runner": "model", "batch": ' + "[" * 900 + "]" * 900 + "}", "no record"),
        ('{"result": ' + "9" * 5000 + "}", "line 3"),
        ("null", "neither"),
        ('["batch"]', "neither"),
        ("{}", "'result'"),
        ('{"result": 99, "tokens": []}', "99"),
        ('{"result": [], "tokens": []}', "line 3"),
        ('{"result": 1, "tokens": [["x"]]}', "tokens"),
        ('{"result": 1, "tokens": 5}', "tokens"),
        ('{"result": 1}', "tokens"),
        ('{"result": 1, "error": 5}', "tokens"),
        ('{"adapter": 0, "folder": "/etc"}', "slot"),
        ('{"adapter": -1, "folder": 5}', "slot"),
        ('{"step": 9, "runner": "nobody", "batch": {}}', "no record"),
    ],
)
def test_a_line_that_is_none_is_named(line, says, recorded, tmp_path, quick):
    lines: list = lines_of(recorded)
    lines[2:] = [line]
    said = refused(write(tmp_path / "file", lines))
    assert "line 3: " in said
    assert says in said


def test_a_sequence_without_a_new_token_is_refused(recorded):
    batch = batches(lines_of(recorded))[0]
    n, rows, draws = batch["query_start"][1], batch["rows"], batch["draws"]
    for name in ("token_ids", "positions", "slots"):
        del batch[name][:n]
    batch["query_start"] = [0, 0, len(batch["token_ids"])]
    rows |= {"chosen": [row - n for row in rows["chosen"][1:]], "counts": [0, 1]}
    for values in draws.values():
        del values[0]
    with pytest.raises(ValueError, match="query_start: "):
        from_json(batch)


def test_a_row_behind_the_last_token_is_refused_though_no_sequence_counts_it(recorded):
    batch = batches(lines_of(recorded))[0]
    batch["rows"]["chosen"].append(len(batch["token_ids"]))
    for values in batch["draws"].values():
        values.append(values[-1])
    with pytest.raises(ValueError, match="chosen: tokens of the step"):
        from_json(batch)


def test_a_draft_model_may_see_fewer_positions(recorded, devices, tmp_path, monkeypatch):
    lines = lines_of(recorded)
    lines[1]["runner"] = "draft"
    longest = max(lines[1]["batch"]["context_lens"])
    for max_positions in (longest, longest - 1):
        config = replace(devices.config, max_positions=max_positions)
        drafting = replace(devices, draft=devices.runner, draft_config=config)
        monkeypatch.setattr(wiring, "load_devices", lambda args, drafting=drafting: drafting)
        steps = replay(write(tmp_path / "file", lines))
        if max_positions == longest:
            next(steps)
        else:
            with pytest.raises(ValueError, match="line 2: context_lens: "):
                next(steps)


def test_a_steps_result_comes_once(recorded, tmp_path, quick):
    lines = lines_of(recorded)
    first = next(i for i, line in enumerate(lines) if "result" in line)
    lines.insert(first, lines[first])
    assert f"line {first + 2}: nothing is known of 1" in refused(write(tmp_path / "file", lines))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("vocab_size", "token_ids"),
        ("positions", "context_lens"),
        ("num_blocks", "tables"),
        ("num_seqs", "sequences"),
        ("num_tokens", "tokens"),
    ],
)
def test_a_step_may_take_all_there_is_and_not_one_more(name, says, recorded):
    """One more would be somebody else's memory."""
    batch = from_json(batches(lines_of(recorded))[0])
    just = Bounds(
        max(batch.token_ids) + 1, max(batch.context_lens), int(batch.tables.max()) + 1, 16,
        num_swap_blocks=0, num_adapters=0, num_seqs=2, num_tokens=batch.num_tokens, has_last_tokens=False,
    )  # fmt: skip
    just.check(batch)
    with pytest.raises(ValueError, match=f"^{says}: "):
        replace(just, **{name: getattr(just, name) - 1}).check(batch)


def test_an_adapter_that_is_not_there_is_named_with_its_line(tmp_path):
    first = about(enable_lora=True, max_lora_rank=2, max_loras=1)
    for slot, folder, says in (
        (0, str(tmp_path / "none"), "none"),
        (0, str(ADAPTERS / "poetry"), "max_lora_rank=2"),
        (1, str(ADAPTERS / "poetry"), "slot"),
        (-1, str(ADAPTERS / "poetry"), "slot"),
        (True, str(ADAPTERS / "poetry"), "slot"),
        (0, "a\n\x1b[2J", "a"),
        (0, "a" * 5000, "long"),
    ):
        said = refused(write(tmp_path / "file", [first, {"adapter": slot, "folder": folder}]))
        assert "line 2: " in said
        assert says in said


HUGE = 2**31 - 1
WRONG = [  # where in a record, and what stands there
    ("runner", "nobody"),
    ("batch.token_ids.0", 10**6),
    ("batch.token_ids.0", -1),
    ("batch.token_ids.0", -2),
    ("batch.token_ids.0", 1.5),
    ("batch.token_ids", "text"),
    ("batch.positions.0", HUGE),
    ("batch.positions.0", -1),
    ("batch.context_lens.0", HUGE),
    ("batch.query_start.1", HUGE),
    ("batch.query_start.1", 0),
    ("batch.tables.0.0", HUGE),
    ("batch.tables.0.0", -1),
    ("batch.tables.0.0", 2**70),
    ("batch.tables", []),
    ("batch.tables", [0, 0]),
    ("batch.slots.0", HUGE),
    ("batch.slots.0", -1),
    ("batch.slots", None),
    ("batch.ids.1", "0/0"),
    ("batch.ids", ["a", {}]),
    ("batch.rows.chosen.0", HUGE),
    ("batch.rows.chosen.0", -1),
    ("batch.rows.counts.0", 2),
    ("batch.rows.counts.0", -1),
    ("batch.rows.logprobs.0", HUGE),
    ("batch.rows.prompt", [0]),
    ("batch.rows", 5),
    ("batch.adapters.0", 0),
    ("batch.adapters.0", -2),
    ("batch.copies", [1]),
    ("batch.copies", [{"number": 0, "kind": "fork", "source": [0], "target": [HUGE]}]),
    ("batch.copies", [{"number": 0, "kind": "fork", "source": [0], "target": [1, 2]}]),
    ("batch.copies", [{"number": 0, "kind": "in", "source": [0], "target": [1]}]),
    ("batch.copies", [{"number": 0, "kind": "away", "source": [0], "target": [1]}]),
    ("batch.draws.positions.0", -1),
    ("batch.draws.rows.0", None),
    ("batch.draws.rows.0.params", [1]),
    ("batch.draws.rows.0.params.0", "all"),
    ("batch.draws.rows.0.temperature", float("nan")),
    ("batch.draws.rows.0.temperature", -1),
    ("batch.draws.rows.0.seed", None),
    ("batch.draws.rows.0.tokens.0", HUGE),
    ("batch.draws.rows.0.tokens.0", -1),
    ("batch.draws.rows.0.tokens", None),
    ("batch.draws.rows.0.factors", [[1, 2]]),
    ("batch.draws.rows.0.factors.0.0", 1e308),
    ("batch.draws.rows.0.stop_ids", [HUGE]),
    ("batch.draws", {}),
    ("batch.unheard_of", 1),
]


def put(line: dict, path: str, value) -> None:
    *way, last = path.split(".")
    for key in way:
        line = line[int(key) if isinstance(line, list) else key]
    line[int(last) if isinstance(line, list) else last] = value


@pytest.mark.parametrize(("path", "value"), WRONG, ids=[f"{path}={value}" for path, value in WRONG])
def test_a_record_of_what_is_not_there_is_refused_before_it_runs(path, value, recorded, tmp_path, quick):
    lines = lines_of(recorded)
    put(lines[1], path, value)
    assert "line 2: " in refused(write(tmp_path / "file", lines))


def test_whatever_is_changed_in_a_recording_it_is_refused_or_it_runs(recorded, tmp_path, quick):
    """A number where it is not expected; on a CPU PyTorch would say that a place does not exist."""
    rng = random.Random(1)
    good = lines_of(recorded)
    values = [-(2**63), -2, -1, 0, 1, 2, 3, 40, 4000, HUGE, 2**70, 0.5, 1e308, None, "0", [], [0], {}, True]

    def leaves(value, path=""):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, below in items:
            yield f"{path}{key}"
            if isinstance(below, dict | list):
                yield from leaves(below, f"{path}{key}.")

    ran, refusals = 0, []
    for _ in range(400):
        lines = copy.deepcopy(good)
        number = rng.choice([0, *[i for i, line in enumerate(lines) if "batch" in line]])
        put(lines[number], rng.choice(list(leaves(lines[number]))), rng.choice(values))
        compared: list[Compared] = []
        try:
            compared += replay(write(tmp_path / "file", lines))
        except ValueError as error:
            refusals.append((number, str(error)))
        else:
            ran += 1
        assert not [c.error_now for c in compared if c.error_now], lines[number]
    assert min(ran, len(refusals)) > 20
    for number, said in refusals:
        line = re.search(r"(?<=^line )\d+(?=: )", said)
        assert (int(line[0]) > number) if line else "first line" in said


# --- where it is written ------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["", "no/such/folder/file", "file/below"])
def test_what_cannot_be_written_is_refused_before_a_model_is_loaded(where, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="record=") as refusal:
        LLM("no-such-model", record=tmp_path / where)
    assert "\n" not in str(refusal.value)
