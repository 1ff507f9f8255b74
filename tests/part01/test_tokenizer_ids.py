"""Ids that are none, and affixes that the model does not have, are refused when the tokenizer is read."""

import json
import shutil
from pathlib import Path

import pytest

from engine.models.checkpoint import ZOO, CheckpointError
from engine.text.tokenizer import Tokenizer


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(ZOO / "storyteller-draft", tmp_path / "model"))


def template(ids):
    steps = [{"SpecialToken": {"id": "X"}}, {"Sequence": {"id": "A"}}]
    return {"type": "TemplateProcessing", "single": steps, "special_tokens": {"X": {"ids": ids}}}


CHANGES = {
    "a token": (lambda raw, id: raw["model"]["vocab"].update({"zzzzq": id}), "'zzzzq'"),
    "an added token": (
        lambda raw, id: raw["added_tokens"].append({"id": id, "content": "<x>", "special": True}),
        "'<x>'",
    ),
    "an affix": (lambda raw, id: raw.update(post_processor=template([0, id])), "'post_processor'"),
}


def refusal(folder: Path, change, id) -> str:
    raw = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    change(raw, id)
    (folder / "tokenizer.json").write_text(json.dumps(raw), encoding="utf-8")
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.from_pretrained(folder)
    return str(caught.value)


@pytest.mark.parametrize("id", [4096, 10**15])
def test_an_affix_that_the_model_does_not_have_is_refused_by_name(folder, id):
    change, name = CHANGES["an affix"]
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    assert size == 4096
    want = f"{folder / 'tokenizer.json'}: {name} has id {id}: config.json's vocab_size is 4096"
    assert refusal(folder, change, id) == want


@pytest.mark.parametrize(("change", "name"), CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("id", [-7, "7", 7.5, None, True, [1]])
def test_what_is_no_id_is_refused_by_name(folder, change, name, id):
    want = f"{folder / 'tokenizer.json'}: {name} has id {id!r}: a whole number from 0 on is accepted"
    assert refusal(folder, change, id) == want


def test_a_text_in_the_place_of_affixes_is_refused(folder):
    assert "'post_processor' has id 'a'" in refusal(
        folder, lambda raw, ids: raw.update(post_processor=template(ids)), "abc"
    )


def test_without_a_model_beside_it_any_number_is_an_id(folder):
    (folder / "config.json").unlink()
    raw = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    raw["model"]["vocab"]["zzzzq"] = 10**6
    (folder / "tokenizer.json").write_text(json.dumps(raw), encoding="utf-8")
    assert Tokenizer.from_pretrained(folder).vocab_size == 10**6 + 1


@pytest.mark.parametrize("eos", [{"lstrip": False}, 5, ["</s>"]])
def test_an_end_of_text_that_is_no_text_is_refused_with_the_file_it_stands_in(folder, eos):
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": eos}), encoding="utf-8")
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.from_pretrained(folder)
    assert str(caught.value) == f"{config}: eos_token={eos!r}: a text is accepted"
