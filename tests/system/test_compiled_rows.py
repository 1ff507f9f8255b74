"""The kernels of Llama's decode steps compile for a GPU: here, once, as it takes long."""

import pytest

pytest.importorskip("triton", reason="needs the package triton")

from tests.part13.compiling import compiled


def test_every_kernel_compiles_for_a_gpu(tmp_path):
    """The interpreter takes what a GPU's compiler refuses."""
    assert compiled("tests.part20.compiled", tmp_path) == {
        "embed_norm", "add_norm", "_rotate_and_store", "_silu_mul", "_attend", "_merge",
        "_embed_row", "_norm_linear", "_linear_add", "_attend_row", "_attend_rows",
    }  # fmt: skip
