"""What llguidance compiles: schemas, grammars, choices and expressions, with every kind of tokenizer."""

import json
import threading
from pathlib import Path

import numpy as np
import pytest

from engine.decoding.params import ParameterError
from engine.decoding.sampling_state import allowed_by
from engine.decoding.structured import StructuredOutputsParams
from engine.structured import compiler as module
from engine.structured.compiler import Compiler, StructuredOutputsConfig
from engine.structured.constraint import OutputConstraint
from engine.text.sentencepiece import SentencePieceTokenizer, from_tokenizer_json
from engine.text.tokenizer import Tokenizer
from tests.part20.sentencepiece import FORMS, tokenizer_json
from tests.partB.keywords import HELD, REFUSED, table

TOKENIZER = Tokenizer.from_pretrained("storyteller")
EOS = (TOKENIZER.eos_token_id,)
COMPILER = Compiler(TOKENIZER, EOS, StructuredOutputsConfig(backend="guidance"))


def structure(**constraint):
    return COMPILER.compile(StructuredOutputsParams(**constraint))


def fits(structure, text: str, tokenizer=TOKENIZER) -> bool:
    """Whether the text, as the tokenizer writes it, is a whole output."""
    matcher = structure.start()
    return all(map(matcher.advance, tokenizer.encode(text, add_special_tokens=False))) and matcher.may_end()


def allowed_ids(mask) -> list[int]:
    """The tokens that a mask allows."""
    return np.flatnonzero(allowed_by(mask, 32 * len(mask))).tolist()


def refusal(**constraint) -> str:
    with pytest.raises(ParameterError) as caught:
        structure(**constraint)
    assert caught.value.field == "structured_outputs"
    return str(caught.value)


def test_the_articles_table_is_that_of_the_keywords():
    article = Path(__file__).parents[2] / "articles" / "B_structured_output.md"
    assert table() in article.read_text(encoding="utf-8"), (
        "the article has another table: `python -m tests.partB.keywords` prints the right one"
    )


@pytest.mark.parametrize("held", HELD, ids=[held.keyword for held in HELD])
def test_a_keyword_holds(held):
    compiled = structure(json=held.schema)
    for instance in held.valid:
        assert fits(compiled, json.dumps(instance, ensure_ascii=False)), f"{instance} fits"
    for instance in held.invalid:
        assert not fits(compiled, json.dumps(instance, ensure_ascii=False)), f"{instance} does not fit"


@pytest.mark.parametrize("keyword", REFUSED)
def test_a_keyword_that_does_not_hold_is_refused_with_its_place(keyword):
    schema, place = REFUSED[keyword]
    assert refusal(json=schema).endswith(f" at {place}")


def test_whitespace_is_free_and_can_be_left_out_or_said():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    free, none = structure(json=schema), structure(json=schema, disable_any_whitespace=True)
    said = structure(json=schema, whitespace_pattern=" ?")
    for text, fitting in {
        '{"a":1}': (True, True, True),
        '{"a": 1}': (True, False, True),
        '{\n  "a": 1\n}': (True, False, False),
    }.items():
        assert tuple(fits(compiled, text) for compiled in (free, none, said)) == fitting, text


def test_properties_may_be_closed_without_a_word_in_the_schema():
    schema = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {}}}}}
    text = '{"a": {"c": 1}}'
    assert fits(structure(json=schema), text)
    assert not fits(structure(json=schema, disable_additional_properties=True), text)


def test_a_json_object_is_any_object_and_nothing_else():
    compiled = structure(json_object=True)
    assert fits(compiled, '{"a": [1, {"b": null}]}')
    assert not fits(compiled, "[1]")


@pytest.mark.parametrize("choice", [["yes", "no"], ['a"b', "a\\b", "a\nb\t", "é😀", "\x01", "<|endoftext|>"]])
def test_a_choice_is_any_text(choice):
    compiled = structure(choice=choice)
    for text in choice:
        matcher = compiled.start()
        ids = [COMPILER._vocabulary.ids[bytes([byte])][0] for byte in text.encode()]
        assert all(map(matcher.advance, ids)), text
        assert matcher.may_end(), text
    assert not fits(compiled, "maybe")


def test_a_grammar_may_call_itself():
    compiled = structure(grammar='start: "(" start ")" | "x"')
    assert fits(compiled, "((x))")
    assert not fits(compiled, "((x)")


def test_an_end_may_come_where_the_text_fits_and_must_where_nothing_else_does():
    output: list[int] = []
    constraint = OutputConstraint(structure(regex="ab?"), EOS, output)
    for text, may_come in (("a", ["a"]), ("b", ["b", "<|endoftext|>"]), ("", ["<|endoftext|>"])):
        (mask,) = constraint.masks([])
        assert sorted(map(TOKENIZER.decode, ([id] for id in allowed_ids(mask)))) == sorted(may_come)
        output += TOKENIZER.encode(text)


def test_drafts_get_masks_as_far_as_they_fit_and_are_taken_back():
    a, b = (TOKENIZER.encode(text)[0] for text in "ab")
    constraint = OutputConstraint(structure(regex="ab?"), EOS, [])
    before = constraint.masks([])[0].tolist()
    assert len(constraint.masks([a, b, EOS[0], EOS[0]])) == 5
    assert len(constraint.masks([a, a, b])) == 2, "the row behind the first that does not fit has none"
    assert len(constraint.masks([EOS[0], a])) == 1, "it may not end here"
    assert constraint.masks([])[0].tolist() == before


def test_a_constraint_that_has_failed_allows_nothing_and_says_why_however_often_it_is_asked():
    constraint = OutputConstraint(structure(regex="ab?"), EOS, TOKENIZER.encode("b"))
    for _ in range(2):
        (mask,) = constraint.masks([])
        assert allowed_ids(mask) == []
        mask[:] = -1  # the mask is the caller's, and no other constraint's
        assert constraint.why_no_token.startswith("structured_outputs: token ")
        assert constraint.why_no_token.count("structured_outputs") == 1


@pytest.mark.parametrize(
    ("constraint", "says"),
    [
        ({"regex": "(?=a)b"}, r"structured_outputs.regex: .*look-ahead"),
        ({"regex": "(a"}, "structured_outputs.regex: .*unclosed group"),
        ({"grammar": "start: foo"}, 'structured_outputs.grammar: .*unknown name: "foo"'),
        ({"json": "false"}, "structured_outputs.json: nothing fits the schema false at #"),
        ({"json": {"items": {"required": ["a"] * 1001}}}, "required has 1001 names; at most 1000"),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_name(constraint, says):
    with pytest.raises(ParameterError, match=says):
        structure(**constraint)


def nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


def chain(first: str, name: str) -> str:
    """Rules of which each is the next."""
    rules = [f"{name}{i}: {name}{i + 1}" for i in range(4000)]
    return "\n".join([f"{first}: {name}0", *rules, f'{name}4000: "a"'])


def wrapped(schema: dict) -> dict:
    for _ in range(20):
        schema = {"items": {"anyOf": [schema]}}
    return schema


CHAIN = {f"d{i}": wrapped({"$ref": f"#/$defs/d{i + 1}"}) for i in range(100)} | {"d100": {}}
REFERENCES = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(30)} | {"d30": {}}
HOSTILE = {
    "a schema in a schema, 900 times": {"json": nested(900)},
    "a megabyte": {"json": json.dumps({"enum": ["x" * 2**20]})},
    "references that double 30 times": {"json": {"$defs": REFERENCES, "$ref": "#/$defs/d0"}},
    "a chain of 1,400 references": {
        "json": {
            "$defs": {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(1400)} | {"d1400": {}},
            "$ref": "#/$defs/d0",
        }
    },
    "a reference to itself": {"json": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
    "allOf of itself": {"json": {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}},
    "1,000 properties": {"json": {"properties": {f"p{i}": {"maxLength": i} for i in range(1000)}}},
    "5,000 options": {"json": {"enum": [f"option {i}" for i in range(5000)]}},
    "a million repetitions": {"regex": "a{1000}{1000}"},
    "repetitions of repetitions": {"regex": "(a?){500}a{500}"},
    "brackets in brackets": {"regex": "(" * 4000 + "a" + ")" * 4000},
    "brackets in brackets of a grammar": {"grammar": "start: " + "(" * 20000 + '"a"' + ")" * 20000},
    "a chain of rules": {"grammar": chain("start", "r")},
    "a chain of terminals": {"grammar": chain("start", "T")},
    "a chain that nests": {"json": {"$defs": CHAIN, "$ref": "#/$defs/d0"}},
    "a rule of itself alone": {"grammar": "start: start"},
    "a thousand items at least": {"json": {"type": "array", "minItems": 100000}},
    "bounds of 300 digits": {"json": {"type": "integer", "minimum": -(10**300), "maximum": 10**300}},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_constraint_is_refused_or_costs_little(name):
    """None takes down the process, or keeps a thread for long; `timeout` in pyproject.toml judges that."""
    refused = ""
    try:
        matcher = structure(**HOSTILE[name]).start()
    except ValueError as error:
        refused = str(error)
    assert refused.startswith("structured_outputs.") or matcher.allowed().any() or matcher.may_end()


def test_a_place_that_would_take_too_long_to_find_is_left_above(monkeypatch):
    monkeypatch.setattr("engine.structured.places.MAX_SECONDS", 0)
    assert refusal(json={"items": {"not": {}}}).endswith(" at #")


def test_what_was_compiled_is_kept_for_the_next_and_the_oldest_is_dropped(monkeypatch):
    monkeypatch.setattr(module, "MAX_CACHED", 2)
    compiler = Compiler(TOKENIZER, EOS, StructuredOutputsConfig())
    a, b, c = ({"type": "string", "maxLength": i} for i in (1, 2, 3))
    first = compiler.compile(StructuredOutputsParams(json=a))
    assert compiler.compile(StructuredOutputsParams(json=json.dumps(a))) is first, (
        "the text of the same schema"
    )
    assert compiler.compile(StructuredOutputsParams(json=a, disable_any_whitespace=True)) is not first
    compiler.compile(StructuredOutputsParams(json=b)), compiler.compile(StructuredOutputsParams(json=c))
    assert len(compiler._cache) == 2
    assert compiler.compile(StructuredOutputsParams(json=a)) is not first


def test_threads_may_compile_and_start_at_once():
    compiler = Compiler(TOKENIZER, EOS, StructuredOutputsConfig())
    failed = []

    def work(seed: int) -> None:
        try:
            for i in range(20):
                compiled = compiler.compile(StructuredOutputsParams(choice=[f"a{(seed + i) % 7}", "b"]))
                assert fits(compiled, f"a{(seed + i) % 7}")
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", ["guidance", "ruvon"])
def test_a_sentencepiece_vocabulary_says_the_same_texts(form, backend):
    """Whatever the masks allow becomes the text, as a stream reads it, byte by byte where it must."""
    fields = from_tokenizer_json(tokenizer_json(form))
    fields.pop("tokenizer_class")
    tokenizer = SentencePieceTokenizer(**fields)
    compiler = Compiler(tokenizer, (2,), StructuredOutputsConfig(backend=backend))
    compiled = compiler.compile(StructuredOutputsParams(choice=["a dog", "né 😀", " no"]))
    said = set()
    for pick in range(12):
        matcher, data = compiled.start(), b""
        while not matcher.may_end():
            bits = [id for id in allowed_ids(matcher.allowed()) if id != 2]
            assert bits, f"nothing may follow {data!r}"
            token_id = bits[pick % len(bits)]
            assert matcher.advance(token_id)
            data += tokenizer.id_to_bytes[token_id]
        said.add(data.decode())
    assert said <= {"a dog", "né 😀", " no"}
    assert len(said) > 1


def test_without_the_library_choice_and_regex_are_our_own(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    compiler = Compiler(TOKENIZER, EOS, StructuredOutputsConfig())
    assert fits(compiler.compile(StructuredOutputsParams(regex="a+b")), "aab")
    with pytest.raises(ParameterError, match=r"pip install 'ruvon\[structured\]'"):
        compiler.compile(StructuredOutputsParams(json={}))
    with pytest.raises(ValueError, match=r"backend='guidance' needs llguidance"):
        Compiler(TOKENIZER, EOS, StructuredOutputsConfig(backend="guidance"))


@pytest.mark.parametrize("field", ["json", "json_object"])
def test_without_the_library_json_is_refused_by_the_name_of_its_field(field):
    compiler = Compiler(TOKENIZER, EOS, StructuredOutputsConfig(backend="ruvon"))
    given = StructuredOutputsParams(**{field: {} if field == "json" else True})
    with pytest.raises(ParameterError, match=rf"^structured_outputs\.{field} needs llguidance"):
        compiler.compile(given)
