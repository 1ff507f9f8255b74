"""A record is written only if the machine was as fast after the measurement as before."""

import json

import pytest

from benchmarks import record as records


@pytest.mark.parametrize(("before", "after"), [(3.0, 3.2), (3.2, 3.0)])
def test_a_steady_machines_record_has_both_measurements(tmp_path, monkeypatch, before, after):
    monkeypatch.setattr(records, "yardstick_ms", lambda: after)
    path = records.record("x", "How long?", {}, {}, folder=tmp_path, yardstick_before=before)
    assert json.loads(path.read_text())["yardstick_ms"] == {"before": before, "after": after}


@pytest.mark.parametrize(("before", "after"), [(3.0, 3.4), (3.4, 3.0)])
def test_a_machine_that_was_not_quiet_writes_nothing(tmp_path, monkeypatch, before, after):
    monkeypatch.setattr(records, "yardstick_ms", lambda: after)
    old = records.record("x", "How long?", {}, {"ms": 1}, folder=tmp_path)
    with pytest.raises(SystemExit, match=r"3\.00 and 3\.40 ms"):
        records.record("x", "How long?", {}, {"ms": 2}, folder=tmp_path, yardstick_before=before)
    assert json.loads(old.read_text())["figures"] == {"ms": 1}


def test_the_yardstick_is_a_time_and_leaves_the_threads_as_they_are():
    import torch

    threads = torch.get_num_threads()
    assert records.yardstick_ms(repeats=1) > 0
    assert torch.get_num_threads() == threads


def test_a_spread_is_from_the_least_to_the_most():
    assert records.spread([3, 1.25, 2]) == "1.25 to 3"
