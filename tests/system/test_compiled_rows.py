"""The kernels of Llama's decode steps compile for a GPU: here, once, as it takes long."""

import pytest

pytest.importorskip("triton", reason="needs the package triton")

from tests.part13.compiling import compiled


def test_every_kernel_compiles_for_a_gpu(tmp_path):
    """The interpreter takes what a GPU's compiler refuses."""
    assert compiled("tests.part20.compiled", tmp_path) == {
        "embed_rms_norm", "add_rms_norm", "_rotate_and_store", "_silu_mul", "_attend", "_merge",
        "_embed_row", "_rms_norm_linear", "_linear_add", "attend_row", "_attend_rows",
    }  # fmt: skip


def test_no_thread_of_a_wide_model_has_more_numbers_than_registers(tmp_path):
    """The assembler moves what is left over to memory: a step of Qwen3-8B would read that, too."""
    told = compiled("tests.part20.spilled", tmp_path)
    assert told == {"qkv:0", "proj:0", "gate_up:0", "down:0", "head:0"}, "bytes that a thread keeps in memory"
