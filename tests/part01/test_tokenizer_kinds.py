"""Other byte-level BPE tokenizers: those of Llama 3 and Qwen give the same ids; other kinds are refused."""

import json
import shutil

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from engine.models.checkpoint import ZOO, CheckpointError
from engine.text.tokenizer import Tokenizer
from tests.part01.unicode_fuzz import WORDS, assigned, assigned_long_ago, strings

# Split patterns of the two families, from their published tokenizer.json files.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
ADDED = [
    AddedToken("<think>", special=False, normalized=False),
    AddedToken("<left>", special=False, normalized=False, lstrip=True),
    AddedToken("<right>", special=True, normalized=False, rstrip=True),
    AddedToken("dog", special=False, normalized=False, single_word=True),
    AddedToken("<think><more>", special=True, normalized=False),
]
ADDED_IN_TEXT = [
    "<think>",
    "<think><more>",
    "<left>",
    "\u3000 <left>",
    "<right>",
    "<right>\n\n",
    "dog",
    "dogs",
    "_dog",
    " dog.",
]
SPLIT = {"type": "Split", "pattern": {"Regex": LLAMA3}, "behavior": "Isolated", "invert": False}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def train(pattern=None, normalizer=None, begin=False, ignore_merges=False, add_prefix_space=False):
    """A small tokenizer of that make, trained by `tokenizers` here and now."""
    theirs = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=pattern is None)
    theirs.pre_tokenizer = byte_level
    if pattern:
        split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        theirs.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    theirs.decoder = decoders.ByteLevel()
    if normalizer:
        theirs.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
        special_tokens=["<|begin|>", "<|end|>"],
    )  # fmt: skip
    theirs.train_from_iterator([*strings(2000, seed=7, known=assigned_long_ago), *WORDS * 20], trainer)
    theirs.add_tokens(ADDED)
    if begin:
        template = processors.TemplateProcessing(
            single="<|begin|> $A <|end|>", special_tokens=[("<|begin|>", 0), ("<|end|>", 1)]
        )
        theirs.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return theirs


KINDS = {
    "llama3": ({"pattern": LLAMA3, "begin": True, "ignore_merges": True}, assigned),
    "qwen": ({"pattern": QWEN, "normalizer": normalizers.NFC()}, assigned_long_ago),
    "nfkd": ({"normalizer": normalizers.Sequence([normalizers.NFKD()])}, assigned_long_ago),
    "gpt2 with a space in front": ({"add_prefix_space": True}, assigned),
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request, tmp_path_factory):
    """(theirs, ours, fuzzed strings)"""
    settings, known = KINDS[request.param]
    theirs = train(**settings)
    folder = tmp_path_factory.mktemp("kind")
    theirs.save(str(folder / "tokenizer.json"))
    return theirs, Tokenizer.from_pretrained(folder), strings(3000, 11, known, WORDS + ADDED_IN_TEXT * 2)


@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_ids_equal_hugging_faces(kind, add_special_tokens):
    theirs, ours, texts = kind
    expected = [e.ids for e in theirs.encode_batch(texts, add_special_tokens=add_special_tokens)]
    for text, ids in zip(texts, expected, strict=True):
        assert ours.encode(text, add_special_tokens) == ids, f"{text!r}: ours left, Hugging Face's right"


@pytest.mark.parametrize("skip", [True, False])
def test_text_equals_hugging_faces(kind, skip):
    theirs, ours, texts = kind
    streams = [encoding.ids for encoding in theirs.encode_batch(texts)]
    expected = theirs.decode_batch(streams, skip_special_tokens=skip)
    for ids, text in zip(streams, expected, strict=True):
        assert ours.decode(ids, skip_special_tokens=skip) == text, f"ours is left, of {ids}"


def test_ignored_merges_give_a_whole_word_its_own_token_though_no_merge_makes_it(tmp_path):
    theirs = train(pattern=LLAMA3, ignore_merges=True)
    raw = json.loads(theirs.to_str())
    raw["model"]["vocab"]["Ġzzyzx"] = theirs.get_vocab_size()
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw), encoding="utf-8")
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = Tokenizer.from_pretrained(tmp_path).encode("a zzyzx")
    assert ids == theirs.encode("a zzyzx").ids
    assert raw["model"]["vocab"]["Ġzzyzx"] in ids


def test_vocab_and_merges_alone_give_the_ids_of_tokenizer_json(embedded_pair, tmp_path):
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(ZOO / "storyteller" / name, tmp_path)
    ours = Tokenizer.from_pretrained(tmp_path)
    texts = [text for text in strings(500, seed=5) if "<|" not in text]
    assert [ours.encode(text) for text in texts] == [embedded_pair.ours.encode(text) for text in texts]


@pytest.mark.parametrize("folder", ["storyteller", "storyteller-draft"])
def test_the_embedded_tokenizers_load_in_transformers_and_agree(folder):
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(ZOO / folder), Tokenizer.from_pretrained(folder)
    texts = strings(300, seed=6)
    assert [ours.encode(text) for text in texts] == theirs(texts)["input_ids"]
    assert (ours.eos_token_id, ours.vocab_size) == (theirs.eos_token_id, len(theirs))


def test_end_of_sequence_may_be_written_as_an_object(embedded_raw, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(embedded_raw), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(
        '{"eos_token": {"content": "<|user|>"}}', encoding="utf-8"
    )
    assert Tokenizer.from_pretrained(tmp_path).eos_token_id == 1


@pytest.fixture(scope="module")
def embedded_raw() -> dict:
    return json.loads((ZOO / "storyteller" / "tokenizer.json").read_text(encoding="utf-8"))


def sequence(*steps: dict) -> dict:
    return {"type": "Sequence", "pretokenizers": list(steps)}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": {"type": "WordPiece"}}, "model is WordPiece"),
        ({"model": {"type": "Unigram"}}, "model is Unigram"),
        ({"model": {"byte_fallback": True}}, "byte_fallback"),
        ({"model": {"dropout": 0.1}}, "model.dropout=0.1"),
        ({"model": {"end_of_word_suffix": "</w>"}}, "end_of_word_suffix='</w>'"),
        ({"model": {"continuing_subword_prefix": "##"}}, "continuing_subword_prefix='##'"),
        ({"pre_tokenizer": {"type": "Metaspace", "replacement": "▁"}}, "pre_tokenizer Metaspace"),
        ({"pre_tokenizer": None}, "pre_tokenizer none"),
        ({"pre_tokenizer": sequence({"type": "Whitespace"}, BYTES)}, "pre_tokenizer Whitespace"),
        ({"pre_tokenizer": sequence(SPLIT | {"behavior": "Removed"}, BYTES)}, "pre_tokenizer"),
        ({"pre_tokenizer": sequence(SPLIT | {"invert": True}, BYTES)}, "pre_tokenizer"),
        ({"pre_tokenizer": sequence(SPLIT, BYTES | {"add_prefix_space": True})}, "pre_tokenizer"),
        ({"pre_tokenizer": sequence(SPLIT | {"pattern": {"Regex": "("}}, BYTES)}, "pre_tokenizer"),
        ({"normalizer": {"type": "Lowercase"}}, "normalizer Lowercase"),
        (
            {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}},
            "NFC [+] Lowercase",
        ),
        ({"post_processor": {"type": "BertProcessing"}}, "post_processor BertProcessing"),
        (
            {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "NFD"}]}},
            "NFC [+] NFD is not supported, only one of",
        ),
    ],
)  # fmt: skip
def test_an_unsupported_kind_is_refused_by_name(embedded_raw, tmp_path, change, named):
    change = {"model": embedded_raw["model"] | change["model"]} if "model" in change else change
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(embedded_raw | change), encoding="utf-8")
    with pytest.raises(CheckpointError, match=rf"tokenizer\.json: .*{named}"):
        Tokenizer.from_pretrained(tmp_path)


ODD = '{"model": %s, "type": "BPE"}, "pre_tokenizer": {"type": "ByteLevel"}}'
GOOD_VOCAB = (ZOO / "storyteller" / "vocab.json").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({}, "no tokenizer; looked for tokenizer.json, and for vocab.json and merges.txt"),
        ({"vocab.json": GOOD_VOCAB}, "merges.txt"),
        ({"merges.txt": "t h\n"}, "vocab.json"),
        ({"vocab.json": GOOD_VOCAB, "merges.txt": "t h\nxyz\n"}, "xyz"),
        ({"vocab.json": GOOD_VOCAB, "merges.txt": "t h e\n"}, "t h e"),
        ({"vocab.json": GOOD_VOCAB, "merges.txt": "Q Z\n"}, "QZ"),
        ({"vocab.json": "[]", "merges.txt": ""}, "vocab.json"),
        ({"tokenizer.json": '{"model": {"type": "B'}, "tokenizer.json"),
        ({"tokenizer.json": "[]"}, "tokenizer.json"),
        ({"tokenizer.json": "null"}, "tokenizer.json"),
        ({"tokenizer.json": "{}"}, "'model'"),
        ({"tokenizer.json": '{"model": null}'}, "tokenizer.json"),
        ({"tokenizer.json": '{"model": {"type": "BPE"}}'}, "tokenizer.json"),
        ({"tokenizer.json": ODD % '{"vocab": [], "merges": []'}, "tokenizer.json"),
        ({"tokenizer.json": ODD % '{"vocab": {"a": [1]}, "merges": []'}, "tokenizer.json"),
        ({"tokenizer.json": "{}", "tokenizer_config.json": "["}, "tokenizer_config.json"),
        ({"tokenizer.json": "{}", "tokenizer_config.json": "[]"}, "tokenizer_config.json"),
    ],
)  # fmt: skip
def test_a_missing_or_damaged_file_is_named_once(tmp_path, files, named):
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=named) as caught:
        Tokenizer.from_pretrained(tmp_path)
    assert str(caught.value).count(str(tmp_path)) == 1


def test_with_ignored_merges_the_replacement_character_is_no_part_of_another(tmp_path):
    """A token of a part of a character decodes to U+FFFD, and is not the token of U+FFFD."""
    theirs = train(pattern=LLAMA3, ignore_merges=True)
    theirs.save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer.from_pretrained(tmp_path)
    for text in ("\ufffd", "a \ufffd", "\ufffd\ufffd b"):
        assert ours.encode(text) == theirs.encode(text).ids
        assert ours.decode(ours.encode(text)) == text
