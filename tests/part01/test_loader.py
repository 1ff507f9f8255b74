"""Every way a checkpoint may be saved gives the same model."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.models.checkpoint import ZOO
from engine.models.loader import load_model
from tests.part01 import reference


def parameters(model) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


def same(a, b) -> bool:
    a, b = parameters(a), parameters(b)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def hf():
    """Several tensors of each kind, small enough to be saved in many ways."""
    return reference.random_gpt2(seed=3)


@pytest.fixture(scope="module")
def expected(hf, tmp_path_factory):
    """The model as one safetensors file gives it, checked against Hugging Face's own tensors."""
    model = load_model(reference.save(hf, tmp_path_factory.mktemp("whole")))
    theirs = hf.transformer.state_dict()
    assert torch.equal(model.embed.weight, theirs["wte.weight"])
    assert torch.equal(model.embed_position.weight, theirs["wpe.weight"])
    assert torch.equal(model.blocks[1].attention.qkv.weight, theirs["h.1.attn.c_attn.weight"].T)
    assert torch.equal(model.blocks[1].mlp.down.bias, theirs["h.1.mlp.c_proj.bias"])
    return model


@pytest.fixture
def folder(hf, tmp_path):
    """Only config.json; the test adds the weights."""
    hf.config.save_pretrained(tmp_path)
    return tmp_path


def save_shards(tensors: dict, folder, single: str, write) -> None:
    """Three files and an index, as Hugging Face names them."""
    stem, _, suffix = single.rpartition(".")
    names = sorted(tensors)
    weight_map = {}
    for i in range(3):
        file = f"{stem}-{i + 1:05d}-of-00003.{suffix}"
        write({name: tensors[name] for name in names[i::3]}, folder / file)
        weight_map |= dict.fromkeys(names[i::3], file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / f"{single}.index.json").write_text(json.dumps(index), encoding="utf-8")


def test_shards_saved_by_hugging_face_equal_the_whole(hf, expected, tmp_path):
    reference.save(hf, tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert same(load_model(tmp_path), expected)


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "before torch 1.6"])
def test_a_pytorch_file_equals_the_safetensors_file(hf, expected, folder, legacy):
    torch.save(hf.state_dict(), folder / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    assert same(load_model(folder), expected)
    assert same(load_model(folder, load_format="pt"), expected)


def test_sharded_pytorch_files_equal_the_whole(hf, expected, folder):
    save_shards(hf.state_dict(), folder, "pytorch_model.bin", torch.save)
    assert same(load_model(folder), expected)


@pytest.mark.parametrize("prefix", ["", "transformer."])
@pytest.mark.parametrize("head", [False, True], ids=["no head", "head"])
@pytest.mark.parametrize("masks", [False, True], ids=["no masks", "masks"])
def test_prefix_tied_head_and_saved_masks_make_no_difference(hf, expected, folder, prefix, head, masks):
    tensors = {prefix + name: tensor.contiguous() for name, tensor in hf.transformer.state_dict().items()}
    if head:
        tensors["lm_head.weight"] = hf.lm_head.weight.detach().clone()
    if masks:
        tensors[f"{prefix}h.0.attn.bias"] = torch.ones(1, 1, 64, 64, dtype=torch.uint8)
        tensors[f"{prefix}h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, folder / "model.safetensors")
    model = load_model(folder)
    assert same(model, expected)
    assert model.head.weight is model.embed.weight


def test_a_head_of_its_own_is_loaded_and_not_tied(tmp_path):
    theirs = reference.random_gpt2(seed=4, tie_word_embeddings=False)
    model = load_model(reference.save(theirs, tmp_path))
    assert torch.equal(model.head.weight, theirs.lm_head.weight)
    assert not torch.equal(model.head.weight, model.embed.weight)


def test_safetensors_win_over_a_pytorch_file_unless_asked(hf, expected, tmp_path):
    reference.save(hf, tmp_path)
    other = {name: tensor + 1 for name, tensor in hf.state_dict().items()}
    torch.save(other, tmp_path / "pytorch_model.bin")
    assert same(load_model(tmp_path), expected)
    assert same(load_model(tmp_path, load_format="safetensors"), expected)
    assert not same(load_model(tmp_path, load_format="pt"), expected)


@pytest.mark.parametrize("saved", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_weights_saved_in_any_precision_run_in_fp32_on_a_cpu(hf, folder, saved):
    tensors = {name: t.to(saved).contiguous() for name, t in hf.transformer.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    model = load_model(folder)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.equal(model.embed.weight, tensors["wte.weight"].float())


@pytest.mark.parametrize("name", ["storyteller", "storyteller-draft"])
def test_the_embedded_weights_are_half_precision_on_disk(name):
    tensors = load_file(ZOO / name / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", torch.float16, torch.float64])
def test_the_dtype_asked_for_is_the_models(tiny_gpt2, dtype):
    model = load_model(tiny_gpt2, dtype=dtype)
    wanted = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {wanted}


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_the_device_is_a_name_or_a_device(tiny_gpt2, device):
    assert {p.device.type for p in load_model(tiny_gpt2, device=device).parameters()} == {"cpu"}


def test_the_model_is_ready_for_inference(tiny_gpt2):
    model = load_model(tiny_gpt2)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_dummy_weights_need_only_the_config_and_are_the_same_each_time(folder, expected):
    first = load_model(folder, load_format="dummy")
    torch.manual_seed(99)
    second = load_model(folder, load_format="dummy")
    assert same(first, second)
    assert {name: p.shape for name, p in parameters(first).items()} == {
        name: p.shape for name, p in parameters(expected).items()
    }
    assert all(parameter.isfinite().all() for parameter in first.parameters())
    assert 0.01 < first.embed.weight.std() < 0.03
    assert first.head.weight is first.embed.weight
    one, other = first.blocks[0].attention.qkv.weight, first.blocks[1].attention.qkv.weight
    assert not torch.equal(one, other), "each layer draws weights of its own"
    drawn = torch.empty_like(first.embed.weight).normal_(0, 0.02, generator=torch.Generator().manual_seed(0))
    assert torch.equal(first.embed.weight, drawn), "the numbers are those of seed 0, as load_model says"
    norm = first.blocks[1].norm2
    assert (set(norm.weight.tolist()), set(norm.bias.tolist())) == ({1.0}, {0.0}), "a norm changes nothing"


def test_dummy_weights_leave_the_callers_random_numbers_alone(folder):
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    load_model(folder, load_format="dummy")
    assert torch.equal(torch.rand(3), wanted)


def test_transform_gets_the_finished_model_and_its_result_is_returned(tiny_gpt2):
    got = []

    def transform(model):
        got.append(model.embed.weight.abs().sum().item())
        return torch.nn.Sequential(model)

    model = load_model(tiny_gpt2, transform=transform)
    assert isinstance(model, torch.nn.Sequential)
    assert got == [load_model(tiny_gpt2).embed.weight.abs().sum().item()]
