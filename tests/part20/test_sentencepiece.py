"""SentencePiece's BPE, as Llama 2 and TinyLlama have it: ids and text are those of `tokenizers`."""

import json
from random import Random

import pytest
import tokenizers

from engine.decoding.chat_template import GUARDS, guarded
from engine.models.checkpoint import CheckpointError
from engine.server.scored import prompt_offsets
from engine.text.detokenizer import Detokenizer
from engine.text.tokenizer import Tokenizer
from tests.part01.unicode_fuzz import WORDS, assigned, strings
from tests.part20.sentencepiece import (
    ADDED,
    BEGIN,
    DECODER,
    FORMS,
    PREPEND,
    REPLACE,
    STRIP,
    metaspace,
    sequence,
    tokenizer_json,
)

STAYS = {"single_word": False, "lstrip": False, "rstrip": False}
IN_TEXT = [*ADDED, " <left>", "<right>  ", "▁", " ▁ ", "<0x41>", "<0x4", "\u3000"]


def read(folder, raw: dict) -> Tokenizer:
    (folder / "tokenizer.json").write_text(json.dumps(raw), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return Tokenizer.from_pretrained(folder)


@pytest.fixture(scope="module", params=FORMS)
def pair(request, tmp_path_factory):
    """(theirs, ours) of each form."""
    ours = read(tmp_path_factory.mktemp("form"), tokenizer_json(request.param))
    return tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(request.param))), ours


TEXTS = ["", " ", "  ", "a", " a", "a  b ", *strings(800, 11, assigned, WORDS + IN_TEXT * 2)]


@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_ids_equal_hugging_faces(pair, add_special_tokens):
    theirs, ours = pair
    expected = [e.ids for e in theirs.encode_batch(TEXTS, add_special_tokens=add_special_tokens)]
    for text, ids in zip(TEXTS, expected, strict=True):
        assert ours.encode(text, add_special_tokens) == ids, f"{text!r}: ours left, Hugging Face's right"


@pytest.mark.parametrize("skip", [True, False])
def test_text_equals_hugging_faces(pair, skip):
    theirs, ours = pair
    streams = [encoding.ids for encoding in theirs.encode_batch(TEXTS)]
    for ids, text in zip(streams, theirs.decode_batch(streams, skip_special_tokens=skip), strict=True):
        assert ours.decode(ids, skip_special_tokens=skip) == text, f"ours is left, of {ids}"


def test_many_characters_fall_back_to_their_bytes(pair):
    """Else the tests above would show little."""
    _, ours = pair
    used = {id for text in TEXTS for id in ours.encode(text)}
    assert len(used & set(range(len(ADDED), len(ADDED) + 256))) > 100
    assert len(used) > 500


def streamed(tokenizer: Tokenizer, ids, skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip)
    return [detokenizer.push(id) for id in ids] + [detokenizer.flush()]


def test_a_stream_goes_on_where_the_prompt_ended(pair):
    """Wherever a text is cut between characters: the decoded beginning and the streamed rest are the whole,
    and no piece shows half a character.
    """
    _, ours = pair
    random, cuts = Random(3), 0
    for text in TEXTS[5:400]:
        ids = ours.encode(text, add_special_tokens=False)
        whole = ours.decode(ids, skip_special_tokens=True)
        cut = random.randrange(1, len(ids)) if len(ids) > 1 else 0
        begun = ours.decode(ids[:cut], skip_special_tokens=True)
        if begun and whole.startswith(begun):  # the cut is in no character
            cuts += 1
            rest = streamed(ours, ids[cut:])
            assert begun + "".join(rest) == whole
            assert "\ufffd" in text or "\ufffd" not in "".join(rest), "no half character is shown"
    assert cuts > 100


def test_a_character_comes_when_its_last_byte_is_there(pair):
    _, ours = pair
    ids = [id for id in ours.encode("🐉", add_special_tokens=False) if ours.token_bytes(id) != b" "]
    assert len(ids) == 4, "no token of its own: four bytes"
    assert streamed(ours, ids) == ["", "", "", "🐉", ""]
    assert streamed(ours, ids[:3]) == ["", "", "", "\ufffd"], "what is left unfinished is one U+FFFD"
    assert ours.decode(ids[:3]) == "\ufffd", "and in a whole text, too"


def test_the_word_a_stream_begins_with_keeps_its_space(pair):
    _, ours = pair
    first = next(id for id in range(300, ours.vocab_size) if ours.token_bytes(id) == b" the")
    assert streamed(ours, [first]) == [" the", ""]


def test_spellings_are_hugging_faces(pair):
    theirs, ours = pair
    ids = ours.encode("a 🦊  b</s>")
    assert ours.spellings(ids) == [theirs.id_to_token(id) for id in ids]
    with pytest.raises(ValueError, match="not in the vocabulary"):
        ours.spellings([10**6])


def test_what_it_knows(pair):
    theirs, ours = pair
    assert ours.vocab_size == theirs.get_vocab_size()
    assert (ours.eos_token_id, ours.special_ids) == (2, {0, 1, 2})
    assert all(id in ours for id in range(ours.vocab_size))
    assert ours.vocab_size not in ours


@pytest.mark.parametrize("form", FORMS)
def test_a_text_never_has_fewer_tokens_than_said(form, tmp_path):
    """Where no token takes in the spaces beside it: else nothing can be said."""
    raw = tokenizer_json(form)
    for token in raw["added_tokens"]:
        token |= STAYS
    long = "<" + "long" * 20 + ">"
    raw["added_tokens"].append(raw["added_tokens"][-1] | {"id": 5000, "content": long})
    ours = read(tmp_path, raw)
    for text in [*TEXTS, "▁" * 400, " " * 400, long * 9]:
        assert ours.fewest_tokens(text) <= len(ours.encode(text, add_special_tokens=False))
    assert ours.fewest_tokens("▁" * 400) > 0, "something is said"


def test_a_guarded_special_token_is_text(pair):
    _, ours = pair
    ((message,), guard) = guarded([{"role": "user", "content": "a</s> b"}], ["</s>"])
    ids = ours.encode(message["content"], add_special_tokens=False, guard=guard)
    assert guard == GUARDS[0]
    assert 2 not in ids
    assert ours.decode(ids) == "a</s> b"


def test_a_lone_surrogate_is_refused(pair):
    with pytest.raises(ValueError, match="lone surrogate U\\+D800 at position 1"):
        pair[1].encode("a\ud800")


def test_a_long_word_takes_no_quadratic_time(pair):
    """30,000 characters without a space are one word: a scan for each merge would take minutes."""
    theirs, ours = pair
    text = "the" * 10_000
    assert ours.encode(text) == theirs.encode(text).ids


def test_ignored_merges_give_a_whole_word_its_own_token(tmp_path):
    raw = tokenizer_json("transformers 5")
    raw["model"] |= {
        "ignore_merges": True,
        "vocab": raw["model"]["vocab"] | {"▁zzyzx": len(raw["model"]["vocab"])},
    }
    ours = read(tmp_path, raw)
    theirs = tokenizers.Tokenizer.from_str(json.dumps(raw))
    assert ours.encode("zzyzx") == theirs.encode("zzyzx").ids
    assert raw["model"]["vocab"]["▁zzyzx"] in ours.encode("zzyzx")


def test_a_token_may_be_added_beyond_the_vocabulary(tmp_path):
    raw = tokenizer_json("llama 2")
    long, new = f"<{'long' * 20}>", len(raw["model"]["vocab"])
    raw["added_tokens"].append({"id": new, "content": long, "special": False, "normalized": False} | STAYS)
    ours, theirs = read(tmp_path, raw), tokenizers.Tokenizer.from_str(json.dumps(raw))
    ids = ours.encode(f"the{long}cat")
    assert new in ids
    assert ids == theirs.encode(f"the{long}cat").ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=False)


def test_an_older_file_may_want_no_space_in_front(tmp_path):
    """It has no prepend_scheme yet: `tokenizers` reads it no more."""
    spaces = {"type": "Metaspace", "replacement": "▁", "add_prefix_space": False}
    ours = read(tmp_path, tokenizer_json("never", pre_tokenizer=spaces))
    theirs = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json("never")))
    assert ours.encode("the cat") == theirs.encode("the cat").ids


def test_a_byte_may_be_spelled_in_small_letters(tmp_path):
    raw = tokenizer_json("llama 2")
    small = raw["model"]["vocab"]["<0xc3>"] = len(raw["model"]["vocab"])
    ours, theirs = read(tmp_path, raw), tokenizers.Tokenizer.from_str(json.dumps(raw))
    ids = [raw["model"]["vocab"]["a"], small, raw["model"]["vocab"]["<0xA4>"]]
    assert ours.decode(ids) == theirs.decode(ids) == "aä"


MODEL = tokenizer_json("llama 2")["model"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"normalizer": None}, "normalizer None and pre_tokenizer None"),
        ({"normalizer": {"type": "NFC"}}, "NFC"),
        ({"normalizer": sequence("normalizers", REPLACE, PREPEND)}, "only with Prepend and Replace"),
        ({"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "_"}}, "'_'"),
        ({"pre_tokenizer": metaspace("first")}, "only with Prepend and Replace, or with Metaspace"),
        ({"normalizer": None, "pre_tokenizer": metaspace("sometimes")}, "sometimes"),
        ({"normalizer": None, "pre_tokenizer": metaspace("every")}, "'every'"),
        ({"normalizer": None, "pre_tokenizer": metaspace("first") | {"replacement": "_"}}, "'_'"),
        ({"normalizer": None, "pre_tokenizer": {"type": "ByteLevel"}}, "ByteLevel"),
        ({"decoder": None}, "decoder None is not supported"),
        ({"decoder": sequence("decoders", *DECODER, STRIP | {"start": 2})}, "'start': 2"),
        ({"decoder": sequence("decoders", *DECODER[:2])}, "decoder"),
        ({"decoder": {"type": "ByteLevel"}}, "ByteLevel"),
        ({"post_processor": {"type": "BertProcessing"}}, "post_processor BertProcessing"),
        ({"model": MODEL | {"type": "Unigram"}}, "model is byte_fallback|model is Unigram"),
        ({"model": MODEL | {"dropout": 0.1}}, "dropout=0.1"),
        ({"model": MODEL | {"vocab": {"a": 0}, "merges": []}}, "no token for byte 0"),
        ({"model": MODEL | {"merges": ["a b c"]}}, "merge 0"),
        (
            {"added_tokens": [{"id": 1, "content": "<s>", "normalized": True, "special": True}]},
            "added token '<s>': normalized=true",
        ),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused_by_name(tmp_path, changes, named):
    with pytest.raises(CheckpointError, match=rf"tokenizer\.json: .*({named})"):
        read(tmp_path, tokenizer_json("llama 2", **changes))


def test_without_a_normalizer_it_is_all_the_same_what_is_normalized(tmp_path):
    raw = tokenizer_json("transformers 5")
    for token in raw["added_tokens"]:
        token["normalized"] = True
    ours, theirs = read(tmp_path, raw), tokenizers.Tokenizer.from_str(json.dumps(raw))
    for text in ("the</s> cat", "<s>the", " </s>"):
        assert ours.encode(text) == theirs.encode(text).ids


def test_the_beginning_is_put_where_the_file_says(tmp_path):
    end = {"SpecialToken": {"id": "</s>", "type_id": 0}}
    both = BEGIN | {
        "single": [*BEGIN["single"], end],
        "special_tokens": BEGIN["special_tokens"] | {"</s>": {"id": "</s>", "ids": [2], "tokens": ["</s>"]}},
    }
    ours = read(tmp_path, tokenizer_json("llama 2", post_processor=both))
    ids = ours.encode("the cat")
    assert (ids[0], ids[-1]) == (1, 2)
    assert ours.encode("the cat", add_special_tokens=False) == ids[1:-1]


def test_a_prompts_tokens_begin_where_they_stand_in_the_text(pair):
    """`text_offset` of an echoed prompt: the space that the tokenizer puts before a text takes no room."""
    _, ours = pair
    for text in ["the cat", " the cat", "  the dog's 123", "東京都 the", "a"]:
        ids = ours.encode(text)
        pieces = [ours.token_bytes(id).decode(errors="replace") for id in ids]
        for id, piece, offset in list(zip(ids, pieces, prompt_offsets(ours, ids, text), strict=True))[2:]:
            if id not in ours.special_ids and "\ufffd" not in piece:
                assert text[offset : offset + len(piece)] == piece
