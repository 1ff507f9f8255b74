"""The interpreter takes what a GPU's compiler refuses (a product of tiles that are too small, say)."""

import pytest

from tests.part13.compiling import compiled

pytest.importorskip("triton", reason="needs the package triton")

KERNELS = {
    "_store", "_attend", "_merge", "_paged_prefill", "_best_of_part", "_best", "_fetch", "_embed",
    "_norm_linear", "_linear_add", "_attend_split", "_attend_whole", "embed_norm", "add_norm",
    "_split_linear",
}  # fmt: skip


def test_every_kernel_compiles_for_a_gpu(tmp_path):
    assert compiled("tests.part13.compiled", tmp_path) == KERNELS
