"""An output that continues a text which is part of what must fit: a message that was cut off goes on."""

import json
from functools import cache

import pytest

from engine import LLM, SamplingParams
from engine.decoding.params import ParameterError
from engine.decoding.structured import StructuredOutputsParams
from engine.structured.choice import Choice
from engine.structured.compiler import Compiler, StructuredOutputsConfig
from engine.structured.matcher import StructureFromMatcher
from engine.text.sentencepiece import SentencePieceTokenizer, from_tokenizer_json
from engine.text.tokenizer import Tokenizer
from tests.part20.sentencepiece import tokenizer_json
from tests.partB.test_grammar import EOS, TOKENIZER, fits
from tests.partB.test_over_http import CHAT, FORMAT, SCHEMA, is_dog, post, url  # noqa: F401
from tests.partB.words import ids, shown, vocabulary

TEXT = '{"name":"Maxé","age":[3,{"friend":"a \\"dog\\" 😀"}]}'
PLAIN_JSON = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
GOES_ON = {"add_generation_prompt": False, "continue_final_message": True}


@cache
def compiler(backend: str = "guidance", tokenizer: Tokenizer = TOKENIZER) -> Compiler:
    return Compiler(tokenizer, EOS, StructuredOutputsConfig(backend=backend))


def behind(prefix: str, of: Compiler, **constraint):
    return of.compile(StructuredOutputsParams(**constraint, prefix=prefix))


def test_behind_a_beginning_comes_what_a_choice_has_left():
    """By hand: `no` was said of `no` and `noon`."""
    matcher = Choice(["yes", "no", "noon"], vocabulary()).start()
    assert matcher.advance(*ids("no"))
    begun = StructureFromMatcher(matcher)
    first, second = begun.start(), begun.start()
    assert shown(first.allowed()) == {"o"}
    assert first.advance(*ids("o"))
    assert shown(second.allowed()) == {"o"}, "each output has a place of its own"
    assert second.may_end(), "`no` is a choice"
    assert not first.may_end()


@pytest.mark.parametrize("end", range(1, len(TEXT) + 1))
def test_wherever_a_text_is_cut_its_rest_fits_and_no_other(end):
    """A cut is a place between two characters: in the middle of a token, too."""
    compiled = behind(TEXT[:end], compiler(), json=PLAIN_JSON)
    assert fits(compiled, TEXT[end:])
    assert not fits(compiled, TEXT[end:] + "}"), "what comes too much does not fit"
    assert end == len(TEXT) or not fits(compiled, TEXT), "the text does not begin anew"


@pytest.mark.parametrize("backend", ["guidance", "ruvon"])
def test_the_masks_behind_a_beginning_are_those_behind_the_same_text_said(backend):
    of = compiler(backend)
    pattern = " (The|A) [a-z]{2,8} (was|and) [a-zé ]{5,30}\\."
    said = " The littlest was a café ow"
    matcher = of.compile(StructuredOutputsParams(regex=pattern)).start()
    assert all(map(matcher.advance, TOKENIZER.encode(said)))
    continued = behind(said, of, regex=pattern).start()
    assert continued.allowed().tolist() == matcher.allowed().tolist()


@pytest.mark.parametrize("backend", ["guidance", "ruvon"])
def test_a_sentencepiece_vocabulary_reads_a_beginning_byte_by_byte_where_it_must(backend):
    fields = from_tokenizer_json(tokenizer_json("llama 2"))
    fields.pop("tokenizer_class")
    of = Compiler(SentencePieceTokenizer(**fields), (2,), StructuredOutputsConfig(backend=backend))
    matcher = behind("né ", of, choice=["a dog", "né 😀"]).start()
    assert all(matcher.advance(of._vocabulary.ids[bytes([byte])][0]) for byte in "😀".encode())
    assert matcher.may_end()


def test_the_name_of_a_special_token_is_text():
    for begun in ("<|endof", "<|endoftext|>"):
        compiled = behind(begun, compiler(), choice=["<|endoftext|>x", "y"])
        assert fits(compiled, "<|endoftext|>x".removeprefix(begun)), begun
        assert not compiled.start().may_end(), "no output has ended there"


@pytest.mark.parametrize("backend", ["guidance", "ruvon"])
def test_a_beginning_that_no_output_has_is_refused_with_the_place(backend):
    words = "the beginning that the output continues does not fit from 'Sure: no' on"
    with pytest.raises(ParameterError, match=rf"^structured_outputs\.choice: {words}$") as caught:
        behind("noSure: no", compiler(backend), choice=["no", "noon"])
    assert caught.value.field == "structured_outputs"
    with pytest.raises(ParameterError, match="does not fit from"):
        behind("noonx", compiler(backend), choice=["no", "noon"])


def test_what_is_behind_a_beginning_is_kept_beside_the_whole():
    of, whole = compiler(), StructuredOutputsParams(choice=["noon"])
    first = of.compile(whole)
    assert not of.knows(of.key(whole.continuing("no"))), "it is to be read"
    begun = of.compile(whole.continuing("no"))
    assert of.compile(whole.continuing("no")) is begun
    assert of.compile(whole) is first
    assert fits(first, "noon"), "others begin at the beginning"
    assert fits(begun, "on")


def go_on(url: str, content, **fields):  # noqa: F811
    messages = [*CHAT["messages"], {"role": "assistant", "content": content}]
    return post(url, "/v1/chat/completions", **CHAT | GOES_ON | {"messages": messages} | fields)


ASKED = [{"response_format": FORMAT}, {"structured_outputs": {"json": SCHEMA}}]


@pytest.mark.parametrize("begun", ['{"na', '{"name":"Ma', '{"name":"Max","age":', "{", ""])
@pytest.mark.parametrize("asked", ASKED, ids=["response_format", "structured_outputs"])
def test_a_message_and_what_continues_it_fit_together(url, begun, asked):  # noqa: F811
    choices = go_on(url, begun, n=2, **asked).json()["choices"]
    for choice in choices:
        assert is_dog(begun + choice["message"]["content"]), choice
        assert choice["finish_reason"] == "stop"
    echoed = go_on(url, begun, echo=True, **asked).json()["choices"][0]["message"]["content"]
    assert echoed == begun + choices[0]["message"]["content"], "and an echo has both"


def test_a_message_continued_in_a_stream_fits_too(url):  # noqa: F811
    events = go_on(url, '{"name":"Ma', stream=True, response_format=FORMAT).text.split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]
    deltas = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks]
    assert is_dog('{"name":"Ma' + "".join(deltas))


def test_text_parts_are_continued_as_the_template_joins_them(url):  # noqa: F811
    parts = [{"type": "text", "text": text} for text in ("{", '"name":"Ma')]
    free = {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "\n?"}}
    said = go_on(url, parts, **free).json()["choices"][0]["message"]["content"]
    assert json.loads('{\n"name":"Ma' + said)["age"] in (3, 4)


def test_to_a_message_that_fits_nothing_is_added(url):  # noqa: F811
    (choice,) = go_on(url, '{"name":"Max","age":3}', response_format=FORMAT).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")


@pytest.mark.parametrize("asked", ASKED, ids=["response_format", "structured_outputs"])
def test_a_message_that_does_not_fit_is_a_400_that_names_the_field(url, asked):  # noqa: F811
    answer = go_on(url, 'Sure! {"name":', **asked)
    assert answer.status_code == 400, answer.text
    error, (name,) = answer.json()["error"], asked
    assert error["param"] == name
    shown_name = "structured_outputs.json" if name == "structured_outputs" else name
    words = "the beginning that the output continues does not fit from"
    assert error["message"] == f"""{shown_name}: {words} 'Sure! {{"name":' on"""


def test_a_message_that_is_too_long_to_be_read_is_a_400_that_names_it(url):  # noqa: F811
    answer = go_on(url, "{" + " " * 70_000, response_format=FORMAT, truncate_prompt_tokens=20)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == "messages"
    assert "has 70001 characters; at most 65536 are accepted" in error["message"]


def test_without_a_constraint_a_message_goes_on_as_ever(url):  # noqa: F811
    free = go_on(url, "Once upon a", temperature=0).json()["choices"]
    text = go_on(url, "Once upon a", temperature=0, response_format={"type": "text"}).json()["choices"]
    assert free == text


def test_offline_the_same_message_goes_on():
    llm = LLM("storyteller", device="cpu")
    said = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=80, structured_outputs=said)
    chats = [
        [*CHAT["messages"], {"role": "assistant", "content": begun}] for begun in ('{"name":"Ma', '{"name":"')
    ]
    outputs = llm.chat(chats, params, use_tqdm=False, **GOES_ON)
    for chat, output in zip(chats, outputs, strict=True):
        assert is_dog(chat[-1]["content"] + output.outputs[0].text)
    assert params.structured_outputs.prefix is None, "the caller's parameters are as they were"
    with pytest.raises(ParameterError, match="the beginning that the output continues does not fit"):
        llm.chat([*CHAT["messages"], {"role": "assistant", "content": "Sure"}], params, **GOES_ON)
    long = [*CHAT["messages"], {"role": "assistant", "content": " " * 70_000}]
    with pytest.raises(ParameterError, match="at most 65536") as caught:
        llm.chat(long, params, **GOES_ON)
    assert caught.value.field == "messages"
