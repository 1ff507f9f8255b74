"""What cannot be had is refused before anything is made: by its sizes, its files, and the memory there is."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from engine.machine import host_memory
from engine.models import gpt2, loader
from engine.models.checkpoint import ZOO, CheckpointError
from engine.models.loader import load_model


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(ZOO / "storyteller-draft", tmp_path / "model"))


@pytest.fixture
def nothing_made(monkeypatch):
    """A model with memory, of whatever size, is a mistake."""
    made = gpt2.Model.__init__

    def init(model, config, device="cpu", **options):
        assert torch.device(device).type == "meta", "a model was made, with memory"
        made(model, config, device=device, **options)

    monkeypatch.setattr(gpt2.Model, "__init__", init)


def edited(folder: Path, **fields) -> Path:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | fields))
    return folder


def refusal(folder: Path, **settings) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_model(folder, **settings)
    return str(caught.value)


def bytes_of(folder: Path) -> int:
    return sum(4 * parameter.numel() for parameter in load_model(folder).parameters())


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_what_does_not_fit_in_memory_is_refused_with_both_numbers(folder, monkeypatch, load_format, request):
    need = bytes_of(folder)
    monkeypatch.setattr(loader, "available_memory", lambda: need)
    load_model(folder, load_format=load_format)  # just fits
    request.getfixturevalue("nothing_made")
    monkeypatch.setattr(loader, "available_memory", lambda: need - 1)
    words = f"this model's weights need {need:,} bytes of memory, and cpu has {need - 1:,} free"
    said = refusal(folder, load_format=load_format)
    assert said.startswith(f"{folder / 'config.json'}: {words}")
    assert "a dtype of fewer bytes" in said, "and what would help"
    assert f"{2 * need:,} bytes" in refusal(folder, dtype=torch.float64, load_format=load_format)


def test_a_system_that_does_not_say_how_much_memory_it_has_bounds_nothing(folder, monkeypatch):
    monkeypatch.setattr(loader, "available_memory", lambda: None)
    assert load_model(folder).config.num_layers


@pytest.mark.parametrize("field", ["n_embd", "n_inner", "vocab_size", "n_positions", "n_layer"])
@pytest.mark.parametrize("size", [10**9, 10**12, 10**30])
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.usefixtures("nothing_made")
def test_absurd_sizes_are_refused_before_anything_is_made(folder, field, size, load_format):
    message = refusal(edited(folder, **{field: size}), load_format=load_format)
    assert message.startswith(f"{folder / 'config.json'}: ")
    assert "bytes of memory" in message or "at most 2,147,483,647" in message or "num_layers=" in message


@pytest.mark.usefixtures("nothing_made")
def test_sizes_whose_product_no_tensor_can_have_are_refused(folder):
    message = refusal(edited(folder, n_embd=2**31 - 8, n_inner=2**31 - 1, n_head=4))
    assert message.startswith(f"{folder / 'config.json'}: ")


@pytest.mark.usefixtures("nothing_made")
def test_more_layers_than_the_files_have_tensors_are_refused_at_once(folder):
    message = refusal(edited(folder, n_layer=100_000))
    assert "num_layers=100000, and the files hold " in message or "bytes of memory" in message


@pytest.mark.usefixtures("nothing_made")
@pytest.mark.parametrize(("field", "words"), [
    ("vocab_size", "tensor 'wte.weight' has shape"), ("n_positions", "tensor 'wpe.weight' has shape"),
    ("n_layer", "missing tensor"),
])  # fmt: skip
def test_sizes_are_compared_with_the_files_before_anything_is_made(folder, field, words):
    raw = json.loads((folder / "config.json").read_text())
    assert words in refusal(edited(folder, **{field: raw[field] + 1}))


def test_memory_that_was_not_to_be_had_after_all_is_an_error_in_words(folder, monkeypatch):
    made = gpt2.Model.__init__

    def init(model, config, device="cpu", **options):
        if torch.device(device).type != "meta":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory\nand a stack")
        made(model, config, device=device, **options)

    monkeypatch.setattr(gpt2.Model, "__init__", init)
    want = f"{folder}: no memory for this model's weights on cpu: DefaultCPUAllocator: can't allocate memory"
    assert refusal(folder) == want


def test_available_memory_is_what_programs_may_still_take(monkeypatch, tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 900 kB\nMemFree: 1 kB\nMemAvailable: 500 kB\nSwapFree: 20 kB\n")
    monkeypatch.setattr(host_memory, "MEMINFO", meminfo)
    monkeypatch.setattr(host_memory, "CGROUPS", ())
    assert host_memory.available_memory() == 520 * 1024
    meminfo.unlink()  # as on macOS
    monkeypatch.setattr(host_memory, "host_memory", lambda: host_memory.HostMemory(None, 7))
    assert host_memory.available_memory() == 7
    monkeypatch.setattr(host_memory, "host_memory", lambda: host_memory.HostMemory(None, None))
    assert host_memory.available_memory() is None


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_has_what_its_limit_leaves(monkeypatch, tmp_path, version):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemAvailable: 500 kB\nSwapFree: 20 kB\n")
    limit, used, prefix = "memory.max", "memory.current", ""
    if version == 1:
        limit, used, prefix = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")

    def write(name: str, text: str) -> None:
        (tmp_path / name).write_text(f"{text}\n")

    in_folder = tuple(cgroup._replace(folder=tmp_path) for cgroup in host_memory.CGROUPS)
    monkeypatch.setattr(host_memory, "MEMINFO", meminfo)
    monkeypatch.setattr(host_memory, "CGROUPS", in_folder)
    write("memory.stat", f"anon 2000\n{prefix}inactive_file 300\n{prefix}active_file 96")
    write(limit, "4096")
    write(used, "2396")
    assert host_memory.available_memory() == 4096 - 2000, "cached files can be dropped; the rest is taken"
    write(used, "5000")
    assert host_memory.available_memory() == 0, "a container may be over a limit that was lowered"
    (tmp_path / used).unlink()
    assert host_memory.available_memory() == 4096, "at most the limit, if the use cannot be read"
    write(limit, "max" if version == 2 else f"{2**63 - 4096}")
    assert host_memory.available_memory() == 520 * 1024, "no limit"


def test_memory_is_pages_times_their_size_and_what_the_system_does_not_say_is_none(monkeypatch):
    reported = {"SC_PAGESIZE": 4096, "SC_AVPHYS_PAGES": 3, "SC_PHYS_PAGES": 5}

    def sysconf(name: str) -> int:
        if name not in reported:
            raise ValueError("unrecognized configuration name")
        return reported[name]

    monkeypatch.setattr(host_memory.os, "sysconf", sysconf, raising=False)
    assert host_memory.host_memory() == (3 * 4096, 5 * 4096), "bytes, free and in all"
    del reported["SC_AVPHYS_PAGES"]
    assert host_memory.host_memory() == (None, 5 * 4096), "macOS does not say what is free"
