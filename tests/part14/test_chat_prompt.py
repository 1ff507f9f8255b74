"""The text and the token ids of a conversation: what the template is given, and who writes special tokens."""

import pytest

from engine.decoding.chat_template import ChatError, ChatTemplate, chat_prompt
from engine.decoding.params import ParameterError
from engine.text.tokenizer_files import AddedToken
from tests.part06.fakes import CONFIG, EOS, TOKENIZER

PLAIN = "<end>{{ messages[0].content }}{{ messages[0].name }}{{ a }}"
HI = [{"role": "user", "content": "Hi", "name": "Ann"}]


def plain_prompt(given=HI, **options):
    return chat_prompt(given, ChatTemplate(PLAIN), TOKENIZER, CONFIG, **options)


def test_all_of_a_message_and_the_variables_reach_the_template():
    text, ids = plain_prompt(variables={"a": "!"})
    assert text == "<end>HiAnn!"
    assert ids == TOKENIZER.encode(text)


@pytest.mark.parametrize(
    ("given", "variables"),
    [
        (HI, {"a": "<end>"}),
        (HI, {"a": {"deep": ["x", {"<end>": 1}]}}),
        ([HI[0] | {"name": "<end>"}], {}),
        ([HI[0] | {"role": "<end>"}], {}),
    ],
)
def test_only_a_content_may_spell_a_special_token(given, variables):
    with pytest.raises(ChatError, match="only a content may spell a special token"):
        plain_prompt(given, variables=variables)
    text, ids = plain_prompt([HI[0] | {"content": "<end>"}])
    assert (text[:10], ids.count(EOS)) == ("<end><end>", 1), "in a content it is text"


@pytest.mark.parametrize("given", [HI[0] | {"role": '<|"|>'}, HI[0] | {"name": "a\\b"}])
def test_a_special_token_that_json_writes_differently_is_found_too(given, monkeypatch):
    added = {token: AddedToken(EOS, token) for token in ('<|"|>', "a\\b")}
    monkeypatch.setattr(TOKENIZER, "added", TOKENIZER.added | added)
    with pytest.raises(ChatError, match="only a content may spell a special token"):
        plain_prompt([given])


@pytest.mark.parametrize(
    ("options", "field", "words"),
    [
        ({"continue_final_message": True}, "continue_final_message", "needs add_generation_prompt=false"),
        ({"variables": {"tools": []}}, "chat_template_kwargs", "has 'tools'"),
        ({"variables": {"messages": []}}, "chat_template_kwargs", "has 'messages'"),
    ],
)
def test_options_that_contradict_each_other(options, field, words):
    with pytest.raises(ParameterError, match=words) as refused:
        plain_prompt(**options)
    assert refused.value.field == field
