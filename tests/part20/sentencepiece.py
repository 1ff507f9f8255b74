"""A small SentencePiece-style BPE, trained by `tokenizers` here and now, in each form such files have."""

import json
from functools import cache

import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from tests.part01.unicode_fuzz import WORDS, assigned_long_ago, strings

REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
PREPEND = {"type": "Prepend", "prepend": "▁"}
DECODER = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
BEGIN = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
}
ADDED = ["<unk>", "<s>", "</s>", "<tool>", "<left>", "<right>"]  # their ids in that order


def sequence(kind: str, *steps: dict) -> dict:
    return {"type": "Sequence", kind: list(steps)}


def metaspace(scheme: str, split: bool = False) -> dict:
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split}


FORMS = {
    "llama 2": {"normalizer": sequence("normalizers", PREPEND, REPLACE), "post_processor": BEGIN},
    "no space in front": {"normalizer": REPLACE, "decoder": sequence("decoders", *DECODER)},
    "transformers 5": {"pre_tokenizer": metaspace("first"), "post_processor": BEGIN},
    "always": {"pre_tokenizer": metaspace("always")},
    "never": {"pre_tokenizer": metaspace("never"), "decoder": sequence("decoders", *DECODER)},
    "words apart": {"pre_tokenizer": metaspace("first", split=True)},
    "an older file": {"pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "add_prefix_space": True}},
}


@cache
def trained() -> str:
    """The model: so few characters have a token that many fall back to their bytes."""
    theirs = tokenizers.Tokenizer(models.BPE())
    theirs.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    trainer = trainers.BpeTrainer(vocab_size=700, limit_alphabet=120, show_progress=False)
    theirs.train_from_iterator([*strings(1500, seed=7, known=assigned_long_ago), *WORDS * 30], trainer)
    return theirs.to_str()


def tokenizer_json(form: str, **changes) -> dict:
    """The file."""
    raw = json.loads(trained())
    known = sorted(raw["model"]["vocab"], key=raw["model"]["vocab"].get)
    spelled = [*ADDED, *(f"<0x{byte:02X}>" for byte in range(256)), *known, "▁▁"]
    raw["model"]["merges"].append(["▁", "▁"])
    raw["model"] |= {
        "vocab": {token: id for id, token in enumerate(spelled)},
        "byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>",
    }  # fmt: skip
    raw["added_tokens"] = [
        {
            "id": id, "content": content, "special": content in ("<unk>", "<s>", "</s>"), "normalized": False,
            "single_word": False, "lstrip": content == "<left>", "rstrip": content == "<right>",
        }
        for id, content in enumerate(ADDED)
    ]  # fmt: skip
    plain = {"normalizer": None, "pre_tokenizer": None, "decoder": sequence("decoders", *DECODER, STRIP)}
    return raw | plain | FORMS[form] | changes
