"""A wrong checkpoint is refused with file, tensor and shapes, and nothing in it is executed."""

import json
import os
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.models.checkpoint import CheckpointError
from engine.models.loader import load_model
from tests.part01 import reference


@pytest.fixture(scope="module")
def hf():
    return reference.random_gpt2(n_layer=1)


@pytest.fixture
def folder(hf, tmp_path):
    """A good checkpoint in one safetensors file, for the test to damage."""
    return reference.save(hf, tmp_path)


@pytest.fixture
def sharded(hf, tmp_path):
    reference.save(hf, tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    return tmp_path


def refusal(folder, **settings) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_model(folder, **settings)
    return str(caught.value)


def change(folder, name, tensor) -> None:
    """Put `tensor` in the place of `name`; None takes it out."""
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(name, None)
    save_file(tensors if tensor is None else tensors | {name: tensor}, folder / "model.safetensors")


@pytest.mark.parametrize("argument", [{"load_format": "gguf"}, {"dtype": "int8"}, {"dtype": "float"}])
def test_a_bad_argument_is_named_with_what_is_accepted(folder, argument):
    ((name, value),) = argument.items()
    with pytest.raises(ValueError, match=rf"{name}='{value}': accepted are auto, "):
        load_model(folder, **argument)


def test_a_device_that_does_not_exist_is_refused_by_name(folder):
    with pytest.raises((ValueError, RuntimeError), match="warp"):
        load_model(folder, device="warp")


def test_a_folder_without_weights_says_what_was_looked_for(folder):
    (folder / "model.safetensors").unlink()
    message = refusal(folder)
    assert str(folder) in message
    assert "model.safetensors" in message
    assert "pytorch_model.bin" in message
    assert "pytorch_model.bin" not in refusal(folder, load_format="safetensors")


@pytest.fixture
def of_codes(folder):
    """A checkpoint that says it holds codes."""
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    raw["quantization_config"] = {"quant_method": "gptq"}
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    return folder


def test_codes_are_refused_unless_somebody_reads_them(of_codes):
    message = refusal(of_codes)
    assert str(of_codes / "config.json") in message
    assert "has a 'quantization_config'" in message
    assert "load_model as restore_quantized=" in message


def test_who_reads_codes_gets_the_model_without_memory_and_the_tensors_and_fills_it(of_codes):
    def restore(model, entry, tensors, where, device):
        assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
        assert (entry, where, device) == ({"quant_method": "gptq"}, of_codes, torch.device("cpu"))
        names.extend(name for _, name, _ in tensors)
        return model.to_empty(device=device)

    names: list[str] = []
    model = load_model(of_codes, restore_quantized=restore)
    assert sorted(names) == sorted(load_file(of_codes / "model.safetensors"))
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_who_reads_codes_gets_no_number_that_is_not_finite(of_codes):
    change(of_codes, "transformer.ln_f.bias", torch.full((48,), torch.nan))
    message = refusal(of_codes, restore_quantized=lambda model, entry, tensors, *where: list(tensors))
    assert "'transformer.ln_f.bias' holds numbers that are not finite" in message


def test_a_folder_that_does_not_exist_is_named(tmp_path):
    assert str(tmp_path / "no") in refusal(tmp_path / "no")


@pytest.mark.parametrize(
    ("name", "shape", "needed"),
    [
        ("transformer.wte.weight", (299, 48), (300, 48)),
        ("transformer.wpe.weight", (48, 64), (64, 48)),
        ("transformer.h.0.attn.c_attn.weight", (144, 48), (48, 144)),  # Conv1D is [in, out]
        ("transformer.h.0.mlp.c_fc.bias", (1,), (192,)),  # would broadcast
        ("transformer.ln_f.weight", (), (48,)),  # would broadcast
    ],
)
def test_a_wrong_shape_is_named_with_file_tensor_and_both_shapes(folder, name, shape, needed):
    change(folder, name, torch.zeros(shape))
    message = refusal(folder)
    assert str(folder / "model.safetensors") in message
    assert name.removeprefix("transformer.") in message
    assert str(tuple(shape)) in message
    assert str(needed) in message


def test_a_missing_tensor_is_named(folder):
    change(folder, "transformer.h.0.ln_1.weight", None)
    message = refusal(folder)
    assert str(folder) in message
    assert "missing tensor 'h.0.ln_1.weight'" in message


def test_of_many_missing_tensors_three_are_named_and_the_rest_counted(folder):
    save_file({"transformer.wte.weight": torch.zeros(300, 48)}, folder / "model.safetensors")
    message = refusal(folder)
    assert message.count("'h.0.") == 3
    assert "and 12 more" in message


@pytest.mark.parametrize("name", ["transformer.h.1.ln_1.weight", "score.weight", "lm_head.bias"])
def test_a_tensor_that_has_no_place_is_named(folder, name):
    change(folder, name, torch.zeros(48))
    message = refusal(folder)
    assert str(folder / "model.safetensors") in message
    assert f"{name.removeprefix('transformer.')}' has no place" in message


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool])
def test_a_tensor_of_whole_numbers_is_refused(folder, dtype):
    change(folder, "transformer.ln_f.bias", torch.zeros(48, dtype=dtype))
    message = refusal(folder)
    assert "ln_f.bias" in message
    assert str(dtype) in message


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 0.5, 0.999])
def test_a_truncated_safetensors_file_is_named(folder, keep):
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: keep if isinstance(keep, int) else int(len(content) * keep)])
    assert str(path) in refusal(folder)


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "before torch 1.6"])
@pytest.mark.parametrize("keep", [0, 1, 2, 10, 100, 0.1, 0.5, 0.9, 0.999])
def test_a_truncated_pytorch_file_is_named(hf, folder, keep, legacy):
    (folder / "model.safetensors").unlink()
    path = folder / "pytorch_model.bin"
    torch.save(hf.state_dict(), path, _use_new_zipfile_serialization=not legacy)
    content = path.read_bytes()
    path.write_bytes(content[: keep if isinstance(keep, int) else int(len(content) * keep)])
    assert str(path) in refusal(folder)


class Malicious:
    """Unpickling this would make a folder: what any other code could do instead."""

    def __init__(self, target) -> None:
        self.target = str(target)

    def __reduce__(self):
        return os.mkdir, (self.target,)


@pytest.mark.parametrize("how", ["torch.save", "pickle"])
def test_code_in_a_pytorch_file_is_refused_and_not_executed(hf, folder, tmp_path, how):
    (folder / "model.safetensors").unlink()
    path, trap = folder / "pytorch_model.bin", tmp_path / "executed"
    content = {**hf.state_dict(), "transformer.extra": Malicious(trap)}
    if how == "torch.save":
        torch.save(content, path)
    else:
        path.write_bytes(pickle.dumps({"transformer.extra": Malicious(trap)}, protocol=2))
    assert str(path) in refusal(folder)
    assert not trap.exists()
    if how == "pickle":  # the trap works where it is not disarmed
        pickle.loads(path.read_bytes())
        assert trap.exists()


@pytest.mark.parametrize("content", [[1, 2], {"wte.weight": "text"}, {"step": 3}, torch.zeros(3)])
def test_a_pytorch_file_that_is_no_dictionary_of_tensors_is_named(folder, content):
    (folder / "model.safetensors").unlink()
    torch.save(content, folder / "pytorch_model.bin")
    assert str(folder / "pytorch_model.bin") in refusal(folder)


def test_a_missing_shard_is_named_with_the_index_that_wants_it(sharded):
    gone = sorted(sharded.glob("*.safetensors"))[1]
    gone.unlink()
    message = refusal(sharded)
    assert str(gone) in message
    assert "model.safetensors.index.json" in message


def test_a_tensor_that_is_not_in_the_shard_the_index_names_is_named(sharded):
    file = sorted(sharded.glob("*.safetensors"))[0]
    tensors = load_file(file)
    name = sorted(tensors)[0]
    del tensors[name]
    save_file(tensors, file)
    message = refusal(sharded)
    assert str(file) in message
    assert name in message


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_a_damaged_index_is_named(sharded, content):
    index = sharded / "model.safetensors.index.json"
    index.write_text(content, encoding="utf-8")
    assert str(index) in refusal(sharded)


@pytest.mark.parametrize("file", ["../outside.safetensors", "/etc/passwd", "..", 7])
def test_an_index_that_points_outside_the_folder_is_refused(sharded, file):
    index = sharded / "model.safetensors.index.json"
    raw = json.loads(index.read_text(encoding="utf-8"))
    raw["weight_map"]["transformer.wte.weight"] = file
    index.write_text(json.dumps(raw), encoding="utf-8")
    message = refusal(sharded)
    assert str(index) in message
    assert str(file) in message


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("format", ["safetensors", "pt"])
def test_numbers_that_are_not_finite_are_refused_with_file_and_tensor(folder, number, format):
    weights = torch.ones(48)
    weights[7] = number
    change(folder, "transformer.ln_f.weight", weights)
    file = folder / "model.safetensors"
    if format == "pt":
        torch.save(load_file(file), folder / "pytorch_model.bin")
        file = folder / "pytorch_model.bin"
    words = "tensor 'ln_f.weight' holds numbers that are not finite, as torch.float32"
    assert refusal(folder, load_format=format) == f"{file}: {words}"


def test_finite_numbers_are_loaded_though_their_sum_is_not_finite(folder):
    """The sum of a tensor is a quick look; only the numbers themselves condemn it."""
    change(folder, "transformer.ln_f.weight", torch.full((48,), 3e38))
    assert load_model(folder).norm.weight.isfinite().all()
    assert "not finite, as torch.float16" in refusal(folder, dtype="float16"), "3e38 is more than fp16 holds"


def test_a_file_name_too_long_for_the_system_is_refused_with_the_index(sharded):
    index = sharded / "model.safetensors.index.json"
    raw = json.loads(index.read_text(encoding="utf-8"))
    raw["weight_map"]["transformer.wte.weight"] = "x" * 5000
    index.write_text(json.dumps(raw), encoding="utf-8")
    message = refusal(sharded)
    assert message.startswith(f"{index}: xxx")
    assert "too long" in message
    assert len(message) < 500


@pytest.mark.parametrize("dtype", ["int64", "float7", ["float16"]])
def test_a_checkpoints_dtype_that_is_none_of_floating_point_is_refused(folder, dtype):
    """Asked for away from a CPU alone, where "auto" means the checkpoint's."""
    path = folder / "config.json"
    raw = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**raw, "dtype": dtype}), encoding="utf-8")
    words = f"{path}: dtype={dtype!r}: a floating point dtype is accepted"
    assert refusal(folder, device="meta", load_format="dummy") == words
