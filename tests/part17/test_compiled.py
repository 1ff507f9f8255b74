"""The interpreter takes what a GPU's compiler refuses."""

import pytest

from tests.part13.compiling import compiled

pytest.importorskip("triton", reason="needs the package triton")


def test_every_kernel_compiles_for_a_gpu(tmp_path):
    assert compiled("tests.part17.compiled", tmp_path) == {
        "_int4_row",
        "_int4_tile",
        "_int8_row",
        "_int8_tile",
        "embed_codes",
        "norm_product",
        "product_add",
    }
