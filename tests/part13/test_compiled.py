"""The interpreter takes what a GPU's compiler refuses (a product of tiles that are too small, say)."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="needs the package triton")

KERNELS = {
    "_store", "_attend", "_merge", "_paged_prefill", "_best_of_part", "_best", "_fetch", "_embed",
    "_norm_linear", "_linear_add", "_few", "_many", "_embed_norm", "_add_norm", "_split_linear",
}  # fmt: skip


def test_every_kernel_compiles_for_a_gpu(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.part13.compiled"],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-800:]
    assert set(done.stdout.split()) == KERNELS
