"""The chat page in a browser: thoughts and calls are shown as text, and what is said next is an answer."""

import json

from tests.part06.fakes import TOKENIZER
from tests.partB.saying import TEMPLATE, WEATHER, Says, saying
from tests.system.chatting import ask, ended, page, said  # noqa: F401
from tests.system.tools import browser  # noqa: F401

FLAGS = {"tool_call_parser": "hermes", "enable_auto_tool_choice": True, "reasoning_parser": "qwen3"}
ARGUMENTS = '{"city": "<b>Rome</b>"}'
CALL = f'<tool_call>{{"name": "get_weather", "arguments": {ARGUMENTS}}}</tool_call>'


def test_calls_are_shown_and_their_answers_sent(page):  # noqa: F811
    backend = Says(f"<think>Hm.</think>Let me see.{CALL}")
    with saying(backend, **FLAGS) as url:
        one = page.at(url)
        one.get_by_role("button", name="Settings").click()
        one.get_by_label("Tools that the model may call").fill(json.dumps([WEATHER]))
        one.keyboard.press("Escape")
        ask(one, "The weather?")
        said(one, f"get_weather({ARGUMENTS})").wait_for()
        ended(one)
        assert one.locator(".thoughts").inner_text() == "Hm."
        assert one.locator(".calls b").count() == 0, "what a model writes never becomes elements"
        ask(one, "Sunny.")
        said(one, "Let me see.").nth(1).wait_for()
        ended(one)
    prompt = TOKENIZER.decode(backend.asked[1][0])
    assert "<user>The weather?<assistant>Let me see.get_weather=" in prompt
    assert "<tool>Sunny.#call_" in prompt, "what is said behind a call is its answer"
    assert prompt.startswith(TEMPLATE.render([], False, tools=[WEATHER]))


def test_tools_that_are_no_json_are_told_of(page):  # noqa: F811
    with saying(Says("x"), **FLAGS) as url:
        one = page.at(url)
        one.get_by_role("button", name="Settings").click()
        one.get_by_label("Tools that the model may call").fill("[")
        one.keyboard.press("Escape")
        ask(one, "Hi")
        said(one, "Settings, tools: no JSON").wait_for()
