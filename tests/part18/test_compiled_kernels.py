"""The interpreter takes what a GPU's compiler refuses."""

import pytest

from tests.part13.compiling import compiled

pytest.importorskip("triton", reason="needs the package triton")


def test_the_kernels_compile_for_a_gpu(tmp_path):
    assert compiled("tests.part18.compiled", tmp_path) == {"_shrink", "_expand"}
