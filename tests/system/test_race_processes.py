"""The processes of benchmarks/against_vllm.py: who waits is stopped, and nothing that was started stays."""

import sys
import time
from pathlib import Path

import pytest

from benchmarks.against_vllm_settings import OURS, Setting
from benchmarks.processes import Racer

PROGRAM = """
import json, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(json.dumps({"child": child.pid}), flush=True)
for line in sys.stdin:
    print(json.dumps({"echo": json.loads(line)}), flush=True)
child.wait()  # it stays although stdin is closed, as a server does
"""

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="reads states from Linux's /proc"
)


def state(pid: int) -> str:
    """T: stopped. Z, or empty: ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def becomes(pid: int, states: tuple[str, ...]) -> bool:
    deadline = time.monotonic() + 60
    while state(pid) not in states and time.monotonic() < deadline:
        time.sleep(0.01)
    return state(pid) in states


def test_who_waits_is_stopped_and_all_ends_with_it(tmp_path):
    racer = Racer([sys.executable, "-c", PROGRAM], {}, tmp_path / "log")
    try:
        with racer:
            child = racer.answer()["child"]
        for pid in (racer.process.pid, child):
            assert becomes(pid, ("T",)), "who waits must take no time from who runs: its children neither"
        with racer:
            assert racer.ask({"jobs": []}) == {"echo": {"jobs": []}}
    finally:
        racer.end()
    assert racer.process.poll() is not None
    assert becomes(child, ("", "Z")), "a child of a racer outlives it"


def test_a_racer_that_ends_is_named_with_its_last_words(tmp_path):
    racer = Racer([sys.executable, "-c", "import sys; sys.exit('no such model')"], {}, tmp_path / "log")
    try:
        with pytest.raises(RuntimeError, match="no such model"):
            racer.answer()
    finally:
        racer.end()


def test_neither_engine_gets_the_other_ones_variables(monkeypatch, tmp_path):
    monkeypatch.setenv("LD_PRELOAD", "/nowhere/libiomp5.so")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    given = Setting(OURS, 2).environment(tmp_path)
    assert given["OMP_NUM_THREADS"] == "2"
    assert "LD_PRELOAD" not in given
    assert not [name for name in given if name.startswith("VLLM_")]
