"""Any order of events: no invariant breaks, and everybody has the tokens it has alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# In a process of its own: which examples Hypothesis makes depends on what has been imported before.
DRIVE = """
import json
import tests.conftest
from hypothesis import Phase
from tests.part12.machine import drive

try:
    told = drive(40, phases=[Phase.generate])
except AssertionError as error:
    told = str(error).splitlines()[0]
except Exception as error:
    told = f"{type(error).__name__}: {error}"
print(json.dumps(told))
"""


def test_no_order_of_events_breaks_an_invariant_or_changes_a_token(record_property, tmp_path):
    """A failure is told in a line; `python -m tests.part12.machine` searches for the shortest way to it."""
    env = os.environ | {"HYPOTHESIS_STORAGE_DIRECTORY": str(tmp_path)}  # nothing is left in this folder
    driven = subprocess.run([sys.executable, "-c", DRIVE], cwd=ROOT, env=env, capture_output=True, text=True)
    assert not driven.returncode, driven.stderr[-1000:]
    done = json.loads(driven.stdout.splitlines()[-1])
    if isinstance(done, str):
        pytest.fail(f"{done} (python -m tests.part12.machine shows how it came about)", pytrace=False)
    for what, count in done.items():
        record_property(what, count)
    rare = ("failed steps", "preempted by the machine", "swapped out", "aborts", "forked samples")
    for what in (*rare, "outputs compared", "tokens found or forked"):
        assert done[what] >= 10, f"hardly any {what}: these runs show nothing"
