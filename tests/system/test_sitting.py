"""benchmarks/sitting.py: what a restless machine gave is put back."""

import json
import re
import subprocess
from itertools import accumulate, chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import sitting
from benchmarks.sitting import (
    Measures,
    Sitting,
    changed,
    in_its_own_process,
    main,
    measure,
    sit_all,
    yardstick,
)


def measures(mean: float) -> Measures:
    return {"read": {"mean_ms": mean, "tenth_ms": 1.0}, "argmax": {"mean_ms": 3.0, "tenth_ms": 3.0}}


REFERENCE = measures(10.5)
STILL = (measures(10.0), measures(10.9))
RESTLESS = {
    "slower": (measures(10.0), measures(11.2), "read took 10 ms before it and 11.2 ms after it"),
    "quicker": (measures(11.2), measures(10.0), "read took 11.2 ms before it and 10 ms after it"),
}


@pytest.fixture
def folder(tmp_path) -> Path:
    """Results: the benchmark's own from before, one of another, and nothing else."""
    (tmp_path / "part99_x.json").write_text(json.dumps({"figures": "old"}))
    (tmp_path / "part98_x.json").write_text(json.dumps({"figures": "another"}))
    return tmp_path


def sat(folder: Path, before: Measures, after: Measures, status: int = 0, within: float = 1.1) -> str | None:
    """A benchmark that writes over its record, and a second one."""

    def run(benchmark: str) -> int:
        assert benchmark == "part99_x --rounds 5"
        for name in ("part99_x", "part99_x_more"):
            (folder / f"{name}.json").write_text(json.dumps({"figures": "new"}))
        return status

    seen = iter((before, after))
    sitting = Sitting(REFERENCE, within, run=run, yardstick=lambda: next(seen), folder=folder)
    return sitting.sit("part99_x --rounds 5")


def results(folder: Path) -> dict[str, dict]:
    return {path.stem: json.loads(path.read_text()) for path in folder.iterdir()}


def test_what_a_still_machine_gave_is_kept_with_both_yardsticks(folder):
    before, after = STILL
    assert sat(folder, before, after) is None
    yardsticks = {"reference": REFERENCE, "before": before, "after": after, "within": 1.1}
    new = {"figures": "new", "yardstick": yardsticks}
    assert results(folder) == {"part99_x": new, "part99_x_more": new, "part98_x": {"figures": "another"}}


@pytest.mark.parametrize("case", RESTLESS)
def test_what_a_restless_machine_gave_is_put_back(folder, case):
    before, after, why = RESTLESS[case]
    assert sat(folder, before, after) == why
    assert results(folder) == {"part99_x": {"figures": "old"}, "part98_x": {"figures": "another"}}


def test_a_benchmark_that_failed_leaves_no_record(folder):
    assert sat(folder, *STILL, status=3) == "it ended with status 3"
    assert results(folder) == {"part99_x": {"figures": "old"}, "part98_x": {"figures": "another"}}


def test_a_yardstick_has_the_mean_and_the_first_tenth_of_each_measure():
    assert measure([5.0, 1.0, 3.0, 2.0, 14.0]) == {"mean_ms": 5.0, "tenth_ms": 1.4}
    seen = yardstick(rounds=3)
    assert set(seen) == {"read of 64 MB", "product", "argmax"}
    for times in seen.values():
        assert 0 < times["tenth_ms"] <= times["mean_ms"]
    assert changed({"before": seen, "after": seen}, within=1) is None


def test_without_a_yardstick_that_agrees_nothing_is_begun(folder):
    seen = iter([measures(12.0)] * 3)

    def run(benchmark: str) -> int:
        pytest.fail("it was begun")

    sitting = Sitting(REFERENCE, 1.1, patience=3, run=run, yardstick=lambda: next(seen), folder=folder)
    why = sitting.sit("part99_x")
    refused = "3 yardsticks were refused, the last: read took 10.5 ms at the sitting's reference and 12 ms"
    assert why == f"it was not begun, {refused} before it"
    assert next(seen, None) is None, "as many as there is patience for"


def test_what_was_refused_is_tried_again_behind_all_others(capsys):
    answers = {"a": [None], "b": ["too wide", None], "c": ["too wide"] * 3}
    asked = []

    def sit(benchmark: str) -> str | None:
        asked.append(benchmark)
        return answers[benchmark].pop(0)

    assert sit_all(["c", "b", "a"], 3, sit) == ["c"]
    assert asked == ["c", "b", "a", "c", "b", "c"]
    assert re.sub(r"\d+ s", "- s", capsys.readouterr().out).splitlines() == [
        "c, try 1, - s: not kept: too wide",
        "b, try 1, - s: not kept: too wide",
        "a, try 1, - s: kept",
        "c, try 2, - s: not kept: too wide",
        "b, try 2, - s: kept",
        "c, try 3, - s: not kept: too wide",
    ]


WRONG = [["--patience", "0"], ["--tries", "0"], ["--within", "0.99"], ["--within", "nan"]]


@pytest.mark.parametrize("wrong", [*([*options, "part99_x"] for options in WRONG), []])
def test_without_a_try_or_a_benchmark_it_says_what_it_needs(monkeypatch, capsys, wrong):
    monkeypatch.setattr("sys.argv", ["sitting", *wrong])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "name a benchmark; --patience, --tries and --within are at least 1" in capsys.readouterr().err


def test_a_machine_that_changed_since_the_sitting_began_is_another(folder):
    """Before and after agree with each other, and each with what is nearest to it in time."""
    before, after = measures(11.4), measures(11.9)
    assert sat(folder, before, after) == "read took 11.9 ms after it and 10.5 ms at the sitting's reference"
    assert results(folder) == {"part99_x": {"figures": "old"}, "part98_x": {"figures": "another"}}


def test_it_waits_for_a_yardstick_that_agrees_and_begins_at_the_first(folder):
    before, after = STILL
    seen, ran = iter((measures(12.0), measures(12.0), before, after)), []

    def run(benchmark: str) -> int:
        ran.append(benchmark)
        (folder / "part99_x.json").write_text(json.dumps({"figures": "new"}))
        return 0

    sitting = Sitting(REFERENCE, 1.1, patience=3, run=run, yardstick=lambda: next(seen), folder=folder)
    assert sitting.sit("part99_x") is None
    assert ran == ["part99_x"], "once"
    yardsticks = {"reference": REFERENCE, "before": before, "after": after, "within": 1.1}
    assert results(folder)["part99_x"]["yardstick"] == yardsticks


def references_of(monkeypatch, yardsticks: list[Measures], *options: str) -> list[Measures]:
    """The reference that each of two benchmarks is given; no yardstick is left over."""
    references, seen = [], iter(yardsticks)
    monkeypatch.setattr(sitting, "in_its_own_process", lambda: next(seen))
    monkeypatch.setattr(Sitting, "sit", lambda self, benchmark: references.append(self.reference))
    monkeypatch.setattr("sys.argv", ["sitting", *options, "part98_x", "part99_x"])
    with pytest.raises(SystemExit, match="False"):
        main()
    assert next(seen, None) is None, "no yardstick more than it needs"
    return references


@pytest.mark.parametrize("earlier", [[10.0], [20.0, 10.0], [10.0, 20.0]])
def test_the_reference_is_a_yardstick_that_agrees_with_one_before_it(monkeypatch, earlier):
    yardsticks = [*map(measures, earlier), REFERENCE]
    assert references_of(monkeypatch, yardsticks) == [REFERENCE, REFERENCE], "one for all"


def test_a_sitting_goes_on_with_the_reference_that_it_wrote(monkeypatch, tmp_path):
    path = tmp_path / "day.json"
    begun = references_of(monkeypatch, [measures(10.0), REFERENCE], "--reference", str(path))
    assert begun == [REFERENCE, REFERENCE] == references_of(monkeypatch, [], "--reference", str(path))


def test_three_yardsticks_of_which_no_two_agree_are_no_reference(monkeypatch):
    seen = iter((measures(10.0), measures(12.0), measures(15.0)))
    monkeypatch.setattr(sitting, "in_its_own_process", lambda: next(seen))
    monkeypatch.setattr(Sitting, "sit", lambda *_: pytest.fail("it was begun"))
    monkeypatch.setattr("sys.argv", ["sitting", "part99_x"])
    with pytest.raises(SystemExit) as ended:
        main()
    took = "read took 12 ms at the second and 15 ms at the third"
    assert ended.value.code == f"nothing was begun, no two of three yardsticks agreed: {took}"


def test_a_yardstick_is_in_ms_of_one_thread_without_the_two_rounds_that_warm_up(monkeypatch):
    rounds = [100, 100, 0.001, 0.002, 0.003, 0.004, 0.005]  # seconds of each measure
    ticks = accumulate(chain.from_iterable((7, took) for took in rounds for _ in range(3)))
    monkeypatch.setattr(sitting, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    sizes, ones = [], torch.ones
    monkeypatch.setattr(torch, "ones", lambda *shape: sizes.append(shape) or ones(*shape))
    seen = yardstick(rounds=5)
    assert list(seen.values()) == [{"mean_ms": 3.0, "tenth_ms": 1.4}] * 3
    assert next(ticks, None) is None, "two rounds more than are asked for, and no third"
    assert torch.get_num_threads() == 1, "one thread"
    assert sizes[0] == (2**26 // 4,), "64 MB of fp32, as its name says"


def test_a_yardstick_is_written_to_four_places():
    assert set(measure([1.23456] * 3).values()) == {1.2346}, "each to a ten-thousandth of a millisecond"


def test_a_tenth_is_no_more_than_a_tenth(folder):
    assert sat(folder, measures(10.0), measures(11.0)) is None
    assert sat(folder, measures(10.0), measures(11.01)) == "read took 10 ms before it and 11 ms after it"


def test_a_record_is_written_as_its_benchmark_wrote_it(folder):
    sat(folder, *STILL)
    text = (folder / "part99_x.json").read_text()
    assert text == json.dumps(json.loads(text), indent=1) + "\n", "as benchmarks/record.py writes it"


def test_a_yardstick_whose_process_fails_is_an_error(monkeypatch, tmp_path):
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho "{\\"asked\\": \\"$*\\"}"\n')
    program.chmod(0o755)
    monkeypatch.setattr(sitting.sys, "executable", str(program))
    assert in_its_own_process() == {"asked": "-m benchmarks.sitting --yardstick"}
    program.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(subprocess.CalledProcessError, match="exit status 3"):
        in_its_own_process()


@pytest.mark.parametrize(
    ("options", "patience", "asked"),
    [([], 40, 2), (["--patience", "1", "--tries", "1"], 1, 1)],
    ids=["by default", "the least"],
)
def test_the_command_is_as_patient_as_it_is_told_and_says_what_was_not_kept(
    monkeypatch, capsys, options, patience, asked
):
    tries = []

    def refuse(self: Sitting, benchmark: str) -> str | None:
        tries.append((benchmark, self.patience))
        return "too wide" if benchmark == "part99_x" else None

    ticks = accumulate([50, 7] * 4)  # each try takes seven seconds
    monkeypatch.setattr(sitting, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    monkeypatch.setattr(sitting, "in_its_own_process", lambda: REFERENCE)
    monkeypatch.setattr(Sitting, "sit", refuse)
    monkeypatch.setattr("sys.argv", ["sitting", *options, "part98_x", "part99_x"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1, "something was not kept"
    assert tries == [("part98_x", patience), *[("part99_x", patience)] * asked]
    out = capsys.readouterr().out
    assert out.count(", 7 s: ") == len(tries), "the seconds that it took"
    monkeypatch.setattr("sys.argv", ["sitting", "part98_x"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0, "all was kept"


def test_the_yardstick_after_one_benchmark_is_the_first_before_the_next(folder):
    seen, ran = [measures(mean) for mean in (10.0, 10.9, 10.1, 12.0, 10.2, 10.3)], []

    def run(benchmark: str) -> int:
        ran.append(len(seen))
        (folder / f"{benchmark}.json").write_text(json.dumps({"figures": len(ran)}))
        return 0

    sitting = Sitting(REFERENCE, 1.1, 2, run, lambda: seen.pop(0), folder)
    assert sitting.sit("part97_x") is None
    assert sitting.sit("part98_x") is None
    assert sitting.sit("part99_x") == "read took 10.1 ms before it and 12 ms after it"
    assert sitting.sit("part99_x") is None, "the one that did not agree counted as the first of two"
    assert ran == [5, 4, 3, 1], "yardsticks left when each began"
    taken = results(folder)
    assert taken["part98_x"]["yardstick"]["before"] == taken["part97_x"]["yardstick"]["after"]


def test_it_says_within_what_the_machine_was_the_same(folder, monkeypatch, capsys):
    before, after = measures(9.0), measures(11.2)
    assert sat(folder, before, after, within=1.25) is None
    assert results(folder)["part99_x"]["yardstick"]["within"] == 1.25
    assert "11.3 ms" in sat(folder, before, measures(11.26), within=1.25)
    asked = []
    monkeypatch.setattr(Sitting, "sit", lambda self, benchmark: asked.append(self.within))
    monkeypatch.setattr(sitting, "in_its_own_process", lambda: REFERENCE)
    for options in ([], ["--within", "1.3"]):
        monkeypatch.setattr("sys.argv", ["sitting", *options, "part99_x"])
        with pytest.raises(SystemExit, match="False"):
            main()
    assert asked == [1.1, 1.3], "a tenth, where nobody says so"


def test_a_record_that_the_benchmark_did_not_write_stays_as_it_was(folder):
    untouched = '{"figures": "of another option"}'
    (folder / "part99_x_other.json").write_text(untouched)
    assert sat(folder, *STILL) is None
    assert (folder / "part99_x_other.json").read_text() == untouched


def test_a_record_of_another_benchmark_is_none_of_its_business(folder):
    def run(benchmark: str) -> int:
        (folder / "part98_x.json").write_text('{"figures": "meanwhile"}')
        return 0

    seen = iter(STILL)
    sitting = Sitting(REFERENCE, 1.1, run=run, yardstick=lambda: next(seen), folder=folder)
    assert sitting.sit("part99_x") is None
    assert results(folder)["part98_x"] == {"figures": "meanwhile"}
