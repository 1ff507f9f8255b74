"""`LLM.chat` hands tools and calls to the model's template."""

import json

import pytest

from engine import LLM, SamplingParams
from engine.decoding.params import ParameterError
from tests.partB.saying import ADD, ASK, WEATHER

GREEDY = SamplingParams(temperature=0, max_tokens=4)
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments.a }}{% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module")
def llm():
    return LLM("storyteller-draft", device="cpu")


def prompt(llm, messages, **options) -> str:
    (output,) = llm.chat(messages, GREEDY, use_tqdm=False, chat_template=TEMPLATE, **options)
    return output.prompt


def test_the_template_reads_tools(llm):
    assert prompt(llm, ASK, tools=[ADD, WEATHER]) == f"{json.dumps([ADD, WEATHER])}<user>Hi"
    assert prompt(llm, ASK) == "<user>Hi"


def test_the_arguments_of_calls_are_objects_as_vllm_gives_them(llm):
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 5}'}}
    turns = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]
    results = [{"role": "tool", "tool_call_id": "1", "content": "7"}]
    assert prompt(llm, [*turns, *results]) == "<user>Hi<assistant>5<tool>7"
    call["function"]["arguments"] = "{"
    with pytest.raises(ParameterError, match=r"the arguments of a call, '\{', are not JSON"):
        prompt(llm, turns)


def test_a_tool_that_is_no_object_is_refused(llm):
    with pytest.raises(ParameterError, match="tools: a list of JSON objects"):
        prompt(llm, ASK, tools=["add"])
