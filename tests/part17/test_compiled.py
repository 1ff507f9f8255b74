"""The interpreter takes what a GPU's compiler refuses."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="needs the package triton")


def test_every_kernel_compiles_for_a_gpu(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.part17.compiled"],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-800:]
    assert done.stdout.split() == ["_int4_row", "_int4_tile", "_int8_row", "_int8_tile"]
