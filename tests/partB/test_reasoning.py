"""Thoughts are told from the answer, whole and in deltas."""

import pytest

from engine.server.answer_pieces import PlainText
from engine.server.reasoning import ThinkParser, ends_in_thoughts
from tests.part04.serving import http, openai_client
from tests.partB.saying import ASK, TEMPLATE, WEATHER, Says, saying

QWEN3 = {"reasoning_parser": "qwen3"}
THOUGHTS, REST = "\nHm. a < b, </thin\n", "\n\nYes: <think> is a mark."
TEXT = f"<think>{THOUGHTS}</think>{REST}"
# text -> (whether the prompt has begun thoughts, thoughts, content)
CASES = {
    "thoughts": (TEXT, False, THOUGHTS, REST),
    "no thoughts": ("Yes.", False, "", "Yes."),
    "empty thoughts": ("<think>\n\n</think>\n\nYes.", False, "\n\n", "\n\nYes."),
    "thoughts without an end": ("<think>Hm. </thi", False, "Hm. </thi", ""),
    "a mark in the middle": ("Yes <think>no</think>", False, "", "Yes <think>no</think>"),
    "a beginning of a mark": ("<thin", False, "", "<thin"),
    "spaces alone": (" \n", False, "", " \n"),
    "begun by the prompt": (f"{THOUGHTS}</think>{REST}", True, THOUGHTS, REST),
    "begun by the prompt, without an end": ("Hm.", True, "Hm.", ""),
}


@pytest.mark.parametrize(("text", "is_thinking", "thoughts", "content"), CASES.values(), ids=CASES)
def test_thoughts_and_content_wherever_the_text_is_cut(text, is_thinking, thoughts, content):
    for cut in range(len(text) + 1):
        parser = ThinkParser(PlainText(), is_thinking)
        pieces = [*parser.feed(text[:cut]), *parser.feed(text[cut:]), *parser.end()]
        got = [
            "".join(piece.text for piece in pieces if piece.kind == kind) for kind in ("reasoning", "content")
        ]
        assert got == [thoughts, content], f"cut after {text[:cut]!r}"


def test_a_prompt_ends_in_thoughts_that_it_has_begun_and_not_ended():
    assert ends_in_thoughts("<assistant><think>\n")
    assert not ends_in_thoughts("<assistant><think>\n\n</think>\n\n"), "Qwen3 with enable_thinking=false"
    assert not ends_in_thoughts("<assistant>")


def ask(url: str, **fields):
    with openai_client(url) as client:
        answer = client.chat.completions.create(model="script", messages=ASK, **fields)
        return list(answer) if fields.get("stream") else answer


def test_a_message_has_its_thoughts_beside_its_content():
    with saying(Says(TEXT), **QWEN3) as url:
        message = ask(url).choices[0].message
        hidden = ask(url, extra_body={"include_reasoning": False}).choices[0].message
    assert (message.reasoning, message.content) == (THOUGHTS, REST)
    assert (hidden.reasoning, hidden.content) == (None, REST)


@pytest.mark.parametrize("include", [True, False])
def test_deltas_have_thoughts_and_then_content(include):
    with saying(Says(TEXT), **QWEN3) as url:
        deltas = [
            chunk.choices[0].delta
            for chunk in ask(url, stream=True, extra_body={"include_reasoning": include})
        ]
    thoughts = [getattr(delta, "reasoning", None) or "" for delta in deltas]
    assert "".join(thoughts) == (THOUGHTS if include else "")
    assert "".join(delta.content or "" for delta in deltas) == REST
    assert not any(thought and delta.content for thought, delta in zip(thoughts, deltas, strict=True))


def test_without_the_flag_thoughts_are_content():
    with saying(Says(TEXT)) as url:
        assert ask(url).choices[0].message.content == TEXT


def test_thoughts_before_a_call():
    text = '<think>Hm.</think>\n<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>'
    flags = QWEN3 | {"tool_call_parser": "hermes", "enable_auto_tool_choice": True}
    with saying(Says(text), **flags) as url:
        message = ask(url, tools=[WEATHER]).choices[0].message
    assert (message.reasoning, message.content) == ("Hm.", None)
    assert message.tool_calls[0].function.name == "get_weather"


def test_what_must_fit_has_no_thoughts():
    with saying(Says('{"city": "x"}'), **QWEN3) as url:
        choice = {"type": "function", "function": {"name": "get_weather"}}
        message = ask(url, tools=[WEATHER], tool_choice=choice).choices[0].message
    assert (message.reasoning, message.tool_calls[0].function.arguments) == (None, '{"city": "x"}')


def test_thoughts_that_are_sent_back_reach_the_template():
    turns = [*ASK, {"role": "assistant", "content": "Yes.", "reasoning": "Hm."}, *ASK]
    with saying(Says("x"), **QWEN3) as url, http(url) as client:
        answer = client.post("/tokenize", json={"messages": turns})
        text = client.post("/detokenize", json={"tokens": answer.json()["tokens"]}).json()["prompt"]
    assert "(Hm.)" in text
    assert text == TEMPLATE.render([turns[0], turns[1] | {"reasoning_content": "Hm."}, turns[2]])
