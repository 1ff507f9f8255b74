"""A quantized model is written, and loaded again by the ordinary loader, which is handed who reads codes."""

import json
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.models.checkpoint import CheckpointError
from engine.models.loader import load_model
from engine.quantization.checkpoint import main, restore, save_quantized
from engine.quantization.layers import LINEARS
from engine.quantization.quantize import model_bytes, pack_quantized, quantize
from engine.text.tokenizer import Tokenizer

load_quantized = partial(load_model, restore_quantized=restore)


def make(source, folder, method, **options):
    model = load_model(source, transform=lambda model: quantize(model, method, **options))
    return model, save_quantized(model, source, folder)


@pytest.fixture
def saved(tiny_gpt2, tmp_path):
    return make(tiny_gpt2, tmp_path / "int4", "int4", group_size=32)[1]


def tensors(model):
    return dict(model.named_parameters()) | dict(model.named_buffers())


@pytest.mark.parametrize("method", LINEARS)
def test_what_was_saved_comes_back(tiny_gpt2, tmp_path, method):
    model, folder = make(tiny_gpt2, tmp_path / "saved", method)
    again = load_quantized(folder)
    assert again.quantization == model.quantization, "config.json says how"
    want, got = tensors(model), tensors(again)
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name], got[name]) for name in want), "tensor by tensor"
    assert again.head.codes.data_ptr() == again.embed.codes.data_ptr(), "the tied head shares again"
    assert model_bytes(again) == model_bytes(model)
    assert not again.training
    assert not any(p.requires_grad for p in again.parameters())
    pack_quantized(again)
    assert again.logits(torch.zeros(1, 64)).shape == (1, 4096)
    assert Tokenizer.from_pretrained(folder).encode("Once upon a time"), "the tokenizer is beside it"


def test_a_tied_head_is_written_once(saved):
    names = load_file(saved / "model.safetensors").keys()
    assert "embed.codes" in names
    assert not any(name.startswith("head.") and name != "head.bias" for name in names)


def test_the_file_is_as_small_as_the_model(tmp_path):
    model, folder = make("storyteller", tmp_path / "int4", "int4")
    size = (folder / "model.safetensors").stat().st_size
    assert model_bytes(model) < size < model_bytes(model) + 20_000, "the tensors, and a header"


def test_loading_never_holds_the_weights_in_full_precision(saved, monkeypatch):
    from engine.models import gpt2

    devices = set()
    original = gpt2.Linear.__init__

    def watched(self, *args, device=None, **options):
        devices.add(str(device))
        original(self, *args, device=device, **options)

    monkeypatch.setattr(gpt2.Linear, "__init__", watched)
    load_quantized(saved)
    assert devices == {"meta"}, "linear layers are made without memory, and replaced"


def test_the_command(tiny_gpt2, tmp_path, capsys):
    main([str(tiny_gpt2), str(tmp_path / "out"), "--quantization", "int4", "--group-size", "128"])
    assert load_quantized(tmp_path / "out").quantization.group_size == 128
    assert "bytes of weights" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="an empty folder is accepted, or a new one"):
        main([str(tiny_gpt2), str(tmp_path / "out"), "--quantization", "int8"])


def test_only_a_quantized_model_that_is_not_packed_is_saved(tiny_gpt2, tmp_path):
    with pytest.raises(ValueError, match="not quantized"):
        save_quantized(load_model(tiny_gpt2), tiny_gpt2, tmp_path / "out")
    model = load_model(tiny_gpt2, transform=lambda model: pack_quantized(quantize(model, "int8")))
    with pytest.raises(ValueError, match="packed for a kernel: save it before"):
        save_quantized(model, tiny_gpt2, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def change_config(folder, **entries):
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] |= entries
    (folder / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"quant_method": "gptq"}, "quant_method='gptq' is not supported, only 'ruvon'"),
        ({"method": "int3"}, "quantization='int3': accepted are int8"),
        ({"group_size": 48}, "group_size=48: accepted are 32, 64, 128"),
        ({"group_size": 64.0}, "group_size=64.0: accepted are 32, 64, 128"),
        ({"bits": 4}, "'bits' is not known; known are method, group_size"),
        ({"group_size": [64]}, "group_size"),
    ],
)
def test_another_kind_is_refused_by_name(saved, entries, words):
    change_config(saved, **entries)
    with pytest.raises(CheckpointError, match=r"config\.json: quantization_config") as caught:
        load_quantized(saved)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("blocks.1.mlp.up.low"), "missing tensor 'blocks.1.mlp.up.low'"),
        (lambda t: t.update(more=torch.zeros(2)), "tensor 'more' has no place in this model"),
        (
            lambda t: t.update({"blocks.0.mlp.up.nibbles": torch.zeros(2, 2, dtype=torch.uint8)}),
            "tensor 'blocks.0.mlp.up.nibbles' has shape (2, 2), the model needs (256, 32)",
        ),
        (
            lambda t: t.update({"blocks.0.mlp.up.nibbles": t["blocks.0.mlp.up.nibbles"].to(torch.int8)}),
            "tensor 'blocks.0.mlp.up.nibbles' is torch.int8, the model needs torch.uint8",
        ),
        (
            lambda t: t.update({"blocks.0.mlp.up.nibbles": t["blocks.0.mlp.up.nibbles"].float()}),
            "is torch.float32, the model needs torch.uint8",
        ),
        (
            lambda t: t.update({"blocks.0.mlp.up.scale": t["blocks.0.mlp.up.scale"].to(torch.int8)}),
            "is torch.int8, the model needs torch.float16",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(saved, change, words):
    file = saved / "model.safetensors"
    content = load_file(file)
    change(content)
    save_file(content, file)
    with pytest.raises(CheckpointError) as caught:
        load_quantized(saved)
    assert words in str(caught.value)
    assert "int4" in str(caught.value), "the folder or file is named"


def test_noise_is_no_codes(saved):
    with pytest.raises(ValueError, match="load_format='dummy': this checkpoint is quantized"):
        load_quantized(saved, load_format="dummy")


def test_codes_of_activations_are_for_a_cpu(tiny_gpt2, tmp_path):
    _, folder = make(tiny_gpt2, tmp_path / "dynamic", "int8_dynamic")
    with pytest.raises(CheckpointError, match="int8_dynamic runs on a CPU, not on meta"):
        load_quantized(folder, device="meta")


def test_what_is_beside_the_weights_is_copied_and_their_index_is_not(tiny_gpt2, tmp_path):
    source = shutil.copytree(tiny_gpt2, tmp_path / "source")
    (source / "notes.txt").write_text("a licence")
    (source / "other.index.json").write_text("{}")
    _, folder = make(source, tmp_path / "out", "int8")
    assert (folder / "notes.txt").read_text() == "a licence"
    assert not (folder / "other.index.json").exists()


def test_a_file_in_the_place_of_the_folder_is_refused(tiny_gpt2, tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(SystemExit, match="out: an empty folder is accepted, or a new one"):
        main([str(tiny_gpt2), str(tmp_path / "out"), "--quantization", "int8"])
    with pytest.raises(SystemExit, match="Not a directory"):
        main([str(tiny_gpt2), str(tmp_path / "out" / "deeper"), "--quantization", "int8"])
