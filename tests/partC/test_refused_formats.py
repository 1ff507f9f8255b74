"""Checkpoints in formats that are not read are refused in a line that names the format and what to do."""

import json

import pytest

from engine.models.checkpoint import CheckpointError
from engine.models.loader import load_model
from engine.quantization.checkpoint import restore
from tests.part01 import reference
from tests.partC.models import random_model

DO = "take the model's checkpoint in full precision, and quantization='int4' or 'int8'"


@pytest.mark.parametrize("method", ["compressed-tensors", "gptq", "awq", "bitsandbytes", "fp8"])
@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_codes_of_another_program(family, method, tmp_path):
    path = reference.save(random_model(family), tmp_path) / "config.json"
    settings = {"quantization_config": {"quant_method": method, "bits": 4}}
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with pytest.raises(CheckpointError, match=rf"config\.json: .*quant_method='{method}' is not") as caught:
        load_model(tmp_path, restore_quantized=restore)
    assert DO in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("as_file", [True, False])
def test_gguf(as_file, tmp_path):
    file = tmp_path / "model-Q4_K_M.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"model-Q4_K_M\.gguf: the format GGUF is not read; take"):
        load_model(file if as_file else tmp_path)


def test_a_folder_that_also_has_gguf_is_read(tmp_path):
    folder = reference.save(random_model("qwen2"), tmp_path)
    (folder / "extra.gguf").write_bytes(b"GGUF")
    assert load_model(folder).config.model_type == "qwen2"
