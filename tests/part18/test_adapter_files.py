"""What PEFT has saved is read as PEFT means it, or refused in words."""

import json
import os
import re
import shutil
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import regex
import torch
from safetensors.torch import load_file, save_file

from engine.lora import config as module
from engine.lora.adapter import read_adapter, targets_of
from engine.lora.config import AdapterConfig, read_config
from engine.lora.request import LoRARequest
from engine.models import gpt2
from engine.models.checkpoint import CheckpointError
from engine.models.config import ModelConfig
from engine.models.weights import Place
from tests.part18.tiny import edited, save_adapter

EVERY_LAYER = [
    f"blocks.{i}.{layer}"
    for i in range(2)
    for layer in ("attention.qkv", "attention.proj", "mlp.up", "mlp.down")
]
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def config(base):
    return ModelConfig.from_pretrained(base)


@pytest.fixture
def folder(adapters, tmp_path) -> Path:
    """A copy of an adapter, to be spoilt."""
    return shutil.copytree(adapters["business"], tmp_path / "copy")


def refused(folder: Path, config: ModelConfig, *words: str, **options) -> None:
    with pytest.raises(CheckpointError) as error:
        read_adapter(folder, config, **options)
    for word in (str(folder), *words):
        assert word in str(error.value), f"the message names {word}"


def rewrite(folder: Path, change) -> None:
    """Save other tensors: `change` gets the dictionary."""
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


@pytest.mark.parametrize(
    ("name", "rank", "scale", "layers"),
    [
        ("poetry", 4, 8 / 4, EVERY_LAYER),
        ("business", 2, 3 / 2, [name for name in EVERY_LAYER if "qkv" in name or "down" in name]),
        ("stable", 3, 2 / 3**0.5, EVERY_LAYER),
    ],
)
def test_rank_scale_and_layers_are_pefts(adapters, config, name, rank, scale, layers):
    adapter = read_adapter(adapters[name], config)
    assert adapter.rank == rank
    assert adapter.scale == pytest.approx(scale), "lora_alpha / r; with use_rslora, / sqrt(r)"
    assert sorted(adapter.layers) == sorted(layers)
    for parts in adapter.layers.values():
        ((A, B, rows),) = [(f.A, f.B, f.rows) for f in parts]
        assert A.shape[0] == B.shape[1] == rank
        assert A.dtype == B.dtype == torch.float32
        assert rows is None


def test_an_adapter_of_the_bare_model_has_shorter_names_and_is_the_same(adapters, config, folder, base):
    """PEFT around GPT2Model, not GPT2LMHeadModel."""
    want = read_adapter(adapters["business"], config)

    def shorten(tensors):
        for name in list(tensors):
            tensors[name.replace("transformer.", "")] = tensors.pop(name)

    rewrite(folder, shorten)
    found = read_adapter(folder, config)
    assert found.layers.keys() == want.layers.keys()
    assert all(torch.equal(found.layers[n][0].A, want.layers[n][0].A) for n in want.layers)
    # An expression is for these shorter names, and what it names has to be there, too.
    edited(folder, target_modules=r"h\.\d\.(attn\.c_attn|mlp\.c_proj)")
    assert read_adapter(folder, config).layers.keys() == want.layers.keys()
    rewrite(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if "h.1.mlp" in name])
    refused(folder, config, "missing tensor 'base_model.model.h.1.mlp.c_proj.lora_A.weight'")


def test_a_regular_expression_may_say_which_layers(base, config, tmp_path):
    folder = save_adapter(
        base, tmp_path / "re", r=1, lora_alpha=1, target_modules=r".*\.1\.attn\.c_(attn|proj)"
    )
    assert isinstance(json.loads((folder / "adapter_config.json").read_text())["target_modules"], str)
    assert sorted(read_adapter(folder, config).layers) == [
        "blocks.1.attention.proj",
        "blocks.1.attention.qkv",
    ]


def test_half_precision_is_read_as_what_it_is(folder, config):
    rewrite(folder, lambda tensors: tensors.update({k: t.half() for k, t in tensors.items()}))
    factors = read_adapter(folder, config).layers["blocks.0.mlp.down"][0]
    assert factors.A.dtype == torch.float32
    assert torch.equal(factors.A, factors.A.half().float())


def test_several_layers_that_are_one_here_are_parts_of_it(base, config, folder, monkeypatch, request):
    """As query, key and value of a Llama: their rows of the fused layer."""
    D, fused = config.hidden_size, gpt2.places

    def places(config):
        table = fused(config)
        for i in range(2):
            del table[f"h.{i}.attn.c_attn.weight"]
            for part, leaf in enumerate("qkv"):
                rows = slice(part * D, (part + 1) * D)
                table[f"h.{i}.attn.{leaf}.weight"] = Place(f"blocks.{i}.attention.qkv.weight", rows)
        return table

    monkeypatch.setattr(gpt2, "places", places)
    targets_of.cache_clear()
    request.addfinalizer(targets_of.cache_clear)

    def split(tensors):
        for name in [name for name in tensors if "c_attn" in name]:
            tensor = tensors.pop(name)
            for part, leaf in enumerate("qv"):
                own = tensor if "lora_A" in name else tensor[2 * part * D : (2 * part + 1) * D]
                tensors[name.replace("c_attn", leaf)] = own.clone()

    rewrite(folder, split)
    found = read_adapter(edited(folder, target_modules=["q", "v", "mlp.c_proj"]), config)
    assert [f.rows for f in found.layers["blocks.0.attention.qkv"]] == [slice(0, D), slice(2 * D, 3 * D)]
    assert targets_of(config)["h.0.attn.k"].shape == (D, D)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"peft_type": "IA3"}, ["peft_type='IA3'", "'LORA' is accepted"]),
        ({"peft_type": ...}, ["peft_type=None"]),
        ({"r": 0}, ["r=0", "a whole number from 1 on"]),
        ({"r": -4}, ["r=-4"]),
        ({"r": "8"}, ["r='8'"]),
        ({"r": True}, ["r=True"]),
        ({"r": ...}, ["r=None"]),
        ({"lora_alpha": "16"}, ["lora_alpha='16'", "a finite number"]),
        ({"lora_alpha": float("nan")}, ["lora_alpha=nan"]),
        ({"lora_alpha": float("inf")}, ["lora_alpha=inf"]),
        ({"lora_alpha": 10**400}, ["lora_alpha=1000"]),
        ({"use_rslora": "yes"}, ["use_rslora='yes'"]),
        ({"use_dora": True}, ["use_dora=True", "not supported here"]),
        ({"bias": "all"}, ["bias='all'", "'none' is accepted"]),
        ({"modules_to_save": ["lm_head"]}, ["modules_to_save=['lm_head']"]),
        ({"rank_pattern": {"c_attn": 4}}, ["rank_pattern"]),
        ({"alpha_pattern": {"c_attn": 4}}, ["alpha_pattern"]),
        ({"layers_to_transform": [0]}, ["layers_to_transform"]),
        ({"layers_to_transform": 0}, ["layers_to_transform=0", "not supported here"]),
        ({"layer_replication": [[0, 2]]}, ["layer_replication"]),
        ({"trainable_token_indices": [3]}, ["trainable_token_indices"]),
        ({"init_lora_weights": "pissa"}, ["init_lora_weights='pissa'", "others change the base"]),
        ({"task_type": "SEQ_CLS"}, ["task_type='SEQ_CLS'"]),
        ({"target_modules": []}, ["target_modules=[]"]),
        ({"target_modules": [1]}, ["target_modules=[1]"]),
        ({"target_modules": "("}, ["no regular expression"]),
        ({"target_modules": 3000 * "(" + "a" + 3000 * ")"}, ["no regular expression"]),
        ({"target_modules": r"\p{L}*"}, ["in braces"]),
        ({"target_modules": "((a{99}){99}){99}"}, ["in braces, counts of up to 1,000 together"]),
        ({"target_modules": "[a-z]{1000000000}"}, ["in braces"]),
        ({"target_modules": "(?:x){e<=20}"}, ["in braces"]),
        ({"target_modules": 10_001 * "a"}, ["at most 10,000 characters"]),
        ({"something_new": True}, ["something_new=True"]),
    ],
)
def test_a_setting_that_is_not_computed_is_refused_by_name(folder, config, fields, words):
    refused(edited(folder, **fields), config, "adapter_config.json", *words)


def test_what_peft_writes_beside_that_has_no_effect(folder, config):
    """fan_in_fan_out says how the base keeps its weights, in PEFT: the adapter is the same either way."""
    for fields in ({"fan_in_fan_out": False}, {"lora_dropout": 0.5}, {"base_model_name_or_path": "../../x"}):
        read_adapter(edited(folder, **fields), config)
    assert read_config(folder).scale == 1.5


def test_a_rank_above_the_slots_is_refused_before_any_tensor_is_read(folder, config):
    (folder / WEIGHTS).unlink()
    refused(folder, config, "r=2: at most max_lora_rank=1 is accepted", max_rank=1)
    refused(edited(folder, r=10**12), config, "r=1000000000000", max_rank=16)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '"r"'])
def test_settings_that_are_no_json_object_are_refused(folder, config, content):
    (folder / "adapter_config.json").write_text(content)
    refused(folder, config, "adapter_config.json")


def test_missing_files_are_named(folder, config):
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    refused(
        folder, config, f"{WEIGHTS}: no such file; adapter_model.bin may hold code: save it as safetensors"
    )
    (folder / "adapter_model.bin").unlink()
    refused(folder, config, f"{WEIGHTS}: no such file")
    (folder / "adapter_config.json").unlink()
    refused(folder, config, "adapter_config.json: no such file")


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_truncated_file_is_refused(folder, config, kept):
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:kept])
    refused(folder, config, WEIGHTS, "truncated or not a safetensors file")


@pytest.mark.parametrize("file", ["adapter_config.json", WEIGHTS])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_is_no_regular_file_is_refused_unopened(folder, config, file, kind):
    """A pipe may never answer: this load would hang, and all that wait behind it."""
    (folder / file).unlink()
    os.mkfifo(folder / file) if kind == "pipe" else (folder / file).symlink_to("/dev/zero")
    refused(folder, config, file, "not a regular file")


def test_settings_that_are_too_large_are_refused_unread(folder, config):
    with (folder / "adapter_config.json").open("wb") as sparse:
        sparse.truncate(1 << 40)
    refused(folder, config, "adapter_config.json", "at most 268,435,456 are accepted")


A_NAME = "base_model.model.transformer.h.1.mlp.c_proj.lora_A.weight"
B_NAME = A_NAME.replace("lora_A", "lora_B")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(B_NAME), [f"missing tensor {B_NAME!r}"]),
        (lambda t: t.pop(A_NAME), [f"missing tensor {A_NAME!r}"]),
        (lambda t: (t.pop(A_NAME), t.pop(B_NAME)), [f"missing tensor {A_NAME!r}", "target_modules names it"]),
        (lambda t: t.update({A_NAME: t[A_NAME].T.contiguous()}), [A_NAME, "(192, 2)", "needs (2, 192)"]),
        (lambda t: t.update({B_NAME: torch.zeros(48, 3)}), [B_NAME, "(48, 3)", "needs (48, 2)"]),
        (lambda t: t.update({A_NAME: t[A_NAME].int()}), [A_NAME, "finite floating point"]),
        (lambda t: t[A_NAME][0].fill_(float("nan")), [A_NAME, "finite floating point"]),
        (lambda t: t[B_NAME][0].fill_(float("inf")), [B_NAME, "finite floating point"]),
        (lambda t: t.update({"x": torch.zeros(1)}), ["tensor 'x' belongs to no linear layer"]),
        (lambda t: t.update({A_NAME.replace("h.1", "h.7"): t[A_NAME].clone()}), ["h.7", "belongs to no"]),
        (lambda t: t.update({A_NAME.replace("c_proj", "c_fc"): torch.zeros(2, 48)}), ["c_fc"]),
        (lambda t: t.update({"base_model.model.lm_head.lora_A.weight": torch.zeros(2, 48)}), ["lm_head"]),
        (lambda t: t.update({A_NAME.replace("h.1.mlp.c_proj", "wte"): torch.zeros(2, 257)}), ["wte"]),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused_by_name(folder, config, change, words):
    rewrite(folder, change)
    refused(folder, config, WEIGHTS, *words)


def test_the_output_layer_has_no_adapter(config):
    for tied in (True, False):
        names = targets_of(replace(config, tie_word_embeddings=tied))
        assert not any("lm_head" in name or "wte" in name for name in names)


@pytest.mark.parametrize("fields", [
    ("", 1, "x"), ("a", 0, "x"), ("a", True, "x"), ("a", "1", "x"), ("a", 1, ""), ("a", 1, None),
])  # fmt: skip
def test_a_request_for_an_adapter_has_a_name_a_number_and_a_folder(fields):
    with pytest.raises(ValueError, match=r"lora_name=''|lora_int_id=|lora_path="):
        LoRARequest(*fields)
    request = LoRARequest("a", 1, "x")
    assert (request.name, request.adapter_id, request.path) == ("a", 1, "x"), "vLLM's other names"


def test_the_home_folder_may_be_written_as_a_tilde(folder, config, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    assert read_adapter("~/copy", config).rank == read_adapter(folder, config).rank


@pytest.mark.parametrize(
    ("targets", "module", "named"),
    [
        (("c_proj",), "transformer.h.0.attn.c_proj", True),
        (("mlp.c_proj",), "transformer.h.0.attn.c_proj", False),
        (("proj",), "transformer.h.0.attn.c_proj", False),  # whole names between dots
        (("c_proj",), "c_proj", True),
        (r".*attn\.c_proj", "transformer.h.0.attn.c_proj", True),
        (r"transformer", "transformer.h.0.attn.c_proj", False),  # an expression is for the whole name
        ("all-linear", "transformer.h.0.attn.c_proj", True),
    ],
)
def test_target_modules_are_read_as_peft_reads_them(targets, module, named):
    assert AdapterConfig(1, 1, False, targets).select([module]) == ({module} if named else set())


class TurnsIn:
    """An expression, and how many turns another thread has, at most, while it is matched once."""

    def __init__(self, expression: str) -> None:
        self.expression, self.turns = regex.compile(expression), 0

    def fullmatch(self, *given, **options):
        turns, done = 0, threading.Event()

        def count() -> None:
            nonlocal turns
            while not done.wait(0.001):
                turns += 1

        other = threading.Thread(target=count)
        other.start()
        try:
            return self.expression.fullmatch(*given, **options)
        finally:
            done.set()
            other.join()
            self.turns = max(self.turns, turns)


@pytest.mark.parametrize("expression", [r"(?:[a-z0-9_.]{0,9}){0,99}(?<!\w)", 3000 * ".*" + r"(?<!\w)"])
def test_an_expression_without_end_is_refused_while_other_threads_go_on(
    folder, config, expression, monkeypatch
):
    matched = TurnsIn(expression)
    monkeypatch.setattr("engine.lora.config.regex.compile", lambda _: matched)
    refused(edited(folder, target_modules=expression), config, "target_modules=", "at most 2 seconds")
    assert matched.turns > 5, "the interpreter's lock is held"


@pytest.mark.parametrize("expression", ["(([a-z0-9_.])+)+!", "((((([a-z0-9_.])+)+)+)+)+!"])
def test_expressions_that_held_the_interpreter_for_ever_are_refused(folder, config, expression):
    refused(edited(folder, target_modules=expression), config)


@pytest.mark.parametrize(
    "expression", [r".*\.h\.\d{1,2}\.attn\.c_attn|.*c_proj", r".*\.h\.[0-9]{1}\.(attn\.c_attn|mlp\.c_proj)"]
)
def test_an_expression_may_count(folder, config, expression):
    targets = AdapterConfig(1, 1, False, expression).select(["transformer.h.0.attn.c_attn", "x.wte"])
    assert targets == {"transformer.h.0.attn.c_attn"}


@pytest.mark.parametrize(
    ("dtype", "alpha", "fine"),
    [
        (torch.float32, 1e30, True), (torch.float32, 1e308, False), (torch.float32, -1e308, False),
        (torch.float32, 1e42, False), (torch.bfloat16, 1e30, True), (torch.bfloat16, 1e40, False),
        (torch.float16, 1e4, True), (torch.float16, -1e6, False), (torch.float16, 1e30, False),
    ],
)  # fmt: skip
def test_a_lora_alpha_that_takes_numbers_beyond_the_slots_dtype_is_refused(
    folder, config, dtype, alpha, fine
):
    """With the number that it takes them to: half precision ends at 65504."""
    edited(folder, lora_alpha=alpha)
    if fine:
        assert read_adapter(folder, config, dtype=dtype).scale == alpha / 2
        return
    tensors = load_file(folder / WEIGHTS)
    largest = abs(alpha) / 2 * max(B.abs().max().item() for name, B in tensors.items() if "lora_B" in name)
    with pytest.raises(CheckpointError) as error:
        read_adapter(folder, config, dtype=dtype)
    said = re.fullmatch(
        rf"{folder}/adapter_config.json: lora_alpha={re.escape(f'{alpha:g}')}: lora_B of '.*' times "
        rf"scale={re.escape(f'{alpha / 2:g}')} has numbers up to (.*): at most (.*) fits (.*)",
        str(error.value),
    )
    assert float(said[1]) > torch.finfo(dtype).max
    assert float(said[1]) <= largest * 1.001, "the number is of this layer"
    assert (said[2], said[3]) == (f"{torch.finfo(dtype).max:g}", str(dtype).removeprefix("torch."))


def test_an_a_that_half_precision_cannot_hold_is_refused(folder, config):
    name = next(name for name in load_file(folder / WEIGHTS) if "lora_A" in name)
    rewrite(folder, lambda tensors: tensors[name].view(-1)[:1].fill_(-7e4))
    assert read_adapter(folder, config)
    refused(folder, config, "lora_A of", "numbers up to 70000: at most 65504 fits", dtype=torch.float16)


def test_the_longest_expression_is_accepted(folder, config):
    names = r".*h\.\d\.(attn\.c_attn|mlp\.c_proj)|"
    longest = names + "a" * (10_000 - len(names))
    assert read_adapter(edited(folder, target_modules=longest), config), "10,000 characters, and no more"


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_lora_alpha_there_is_is_finite(folder, sign):
    largest = sign * sys.float_info.max
    assert read_config(edited(folder, lora_alpha=largest)).lora_alpha == largest


def test_all_names_together_have_the_time_of_an_expression(monkeypatch):
    seconds = iter([10.0, 10.5, 11.5, 13.0])  # when matching begins, and before each name
    given = []

    def fullmatch(name, timeout, concurrent):
        given.append(timeout)

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    expression = SimpleNamespace(fullmatch=fullmatch)
    monkeypatch.setattr(module, "regex", SimpleNamespace(compile=lambda text: expression))
    assert AdapterConfig(4, 4, False, ".*").select(["a", "b", "c"]) == set()
    assert given == [1.5, 0.5, 0.001], "2 seconds, less what has passed; 0 would be no limit"
