"""`ruvon replay FILE`: what is no recording is refused, and the line is named."""

from dataclasses import replace

import pytest

from engine.cli.replay import replay as command
from engine.wiring import replay as wiring
from engine.wiring.replay import args_of, replay
from tests.system.recordings import about, lines_of, refused, write
from tests.system.test_adapters import ADAPTERS


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


def test_a_draft_model_may_see_fewer_positions(recorded, devices, tmp_path, monkeypatch):
    lines = lines_of(recorded)
    lines[1]["runner"] = "draft"
    longest = max(lines[1]["batch"]["context_lens"])
    for max_positions in (longest, longest - 1):
        config = replace(devices.config, max_positions=max_positions)
        drafting = replace(devices, draft_runner=devices.runner, draft_config=config)
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


@pytest.mark.parametrize(("error", "says"), [(MemoryError(), "MemoryError"), (RuntimeError("a\nb"), "a")])
def test_options_that_this_machine_cannot_meet_are_the_first_lines_fault(error, says, tmp_path, monkeypatch):
    def load(args):
        raise error

    monkeypatch.setattr(wiring, "load_devices", load)
    assert refused(write(tmp_path / "file", [about()])).endswith(f"line 1: {says}")
