"""What clients send by habit: the bodies that these programs sent, recorded word for word on 2026-11-24.

The clients are openai 3.57, langchain-openai 1.7.4, litellm 1.110.2, llama-index-llms-openai-like 0.8.1 and
lm_eval 0.4.13, used as in their READMEs, with a base URL. None of them is needed here.
"""

import json

import pytest

from engine.decoding.chat_template import ChatTemplate
from engine.demo.server import served
from tests.part04.serving import http

TEMPLATE = ChatTemplate.from_pretrained("storyteller")
USER = {"role": "user", "content": "Tell me a story"}
SYSTEM = {"role": "system", "content": "You tell stories."}
AND = {"role": "user", "content": "And then?"}
M, CHAT, TEXT, RESPONSES = "storyteller", "/v1/chat/completions", "/v1/completions", "/v1/responses"
OPENAI = {"model": M, "messages": [USER], "max_tokens": 8, "temperature": 0}
LANGCHAIN = {"model": M, "stream": False, "messages": [USER], "max_completion_tokens": 8, "temperature": 0.0}
LITELLM = {"model": M, "messages": [SYSTEM, USER], "max_tokens": 8}
LLAMA_INDEX = LITELLM | {"stream": False, "temperature": 0.0}
LM_EVAL = {"model": M, "max_tokens": 8, "temperature": 0.0, "seed": 1234}
# An answer of the openai client as a message of the next request: `message.model_dump()`.
DUMPED = {
    "content": "Hi", "refusal": None, "role": "assistant", "annotations": None, "audio": None,
    "function_call": None, "tool_calls": None,
}  # fmt: skip
# An item of an answer's `output`, as the openai client sends it back.
OUTPUT = {
    "id": "msg_9316a8e20e224ab0990070ab4d82a425", "role": "assistant", "status": "incomplete",
    "type": "message", "content": [{"annotations": [], "text": "Hi", "type": "output_text", "logprobs": []}],
}  # fmt: skip
NULLS = {
    "service_tier": "auto", "audio": None, "function_call": None, "functions": None, "logit_bias": None,
    "logprobs": None, "metadata": {"a": "b"}, "modalities": ["text"], "n": None, "parallel_tool_calls": None,
    "prediction": None, "reasoning_effort": None, "response_format": None, "seed": None, "stop": None,
    "store": False, "tool_choice": None, "tools": None, "top_p": None, "user": "me",
}  # fmt: skip
COMPLETION_NULLS = {
    "frequency_penalty": 0, "logprobs": None, "n": 1, "presence_penalty": 0, "seed": None, "top_p": 1
}  # fmt: skip
HABITS = {
    "openai": (CHAT, OPENAI),
    "openai, optional arguments as None": (CHAT, OPENAI | NULLS),
    "openai, an answer sent back": (CHAT, OPENAI | {"messages": [USER, DUMPED, AND]}),
    "openai, no words yet": (CHAT, OPENAI | {"messages": [USER, DUMPED | {"content": None}, AND]}),
    "openai, its stream helper": (
        CHAT, OPENAI | {"stream": True, "stream_options": {"include_usage": True}, "tools": []}
    ),
    "openai, a response": (
        RESPONSES, {"model": M, "input": "Tell me a story", "max_output_tokens": 8, "temperature": 0}
    ),
    "openai, a response streamed": (
        RESPONSES,
        {"model": M, "stream": True, "input": "Tell me a story", "max_output_tokens": 8, "temperature": 0},
    ),
    "openai, a response's answer sent back": (
        RESPONSES,
        {"model": M, "input": [USER, OUTPUT, AND], "instructions": "Be kind.", "max_output_tokens": 8,
         "temperature": 0, "store": False},
    ),
    "langchain": (CHAT, LANGCHAIN),
    "langchain, a name": (CHAT, LANGCHAIN | {"messages": [SYSTEM, USER | {"name": "Ann"}]}),
    "langchain, an empty answer": (
        CHAT, LANGCHAIN | {"messages": [USER, {"content": "", "role": "assistant"}, AND]}
    ),
    "langchain, no tools bound": (CHAT, LANGCHAIN | {"tools": []}),
    "langchain, streamed": (CHAT, LANGCHAIN | {"stream": True, "stream_options": {"include_usage": True}}),
    "langchain, extra_body": (
        CHAT, LANGCHAIN | {"top_k": 5, "chat_template_kwargs": {"enable_thinking": False}}
    ),
    "langchain, logprobs": (CHAT, LANGCHAIN | {"logprobs": True, "top_logprobs": 2}),
    "langchain, completions": (
        TEXT,
        {"model": M, "prompt": ["Once", "Twice"], "max_tokens": 8, "temperature": 0.0} | COMPLETION_NULLS,
    ),
    "langchain, a response": (
        RESPONSES,
        {"model": M, "stream": False, "input": [{"type": "message"} | USER], "max_output_tokens": 8},
    ),
    "langchain, a response's answer sent back": (
        RESPONSES,
        {"model": M, "stream": False, "max_output_tokens": 8, "input": [
            {"content": "Be kind.", "role": "system", "type": "message"},
            {"content": "Hi", "role": "user", "type": "message"},
            {"type": "message", "content": [{"type": "output_text", "text": "Once", "annotations": []}],
             "role": "assistant", "id": "msg_12916c518bc54e9ca68d2f023246b9a1"},
            {"content": "And?", "role": "user", "type": "message"},
        ]},
    ),
    "litellm": (CHAT, LITELLM | {"temperature": 0}),
    "litellm, streamed": (CHAT, LITELLM | {"stream": True, "stream_options": {"include_usage": True}}),
    "litellm, an answer sent back": (
        CHAT,
        LITELLM
        | {"messages": [SYSTEM, USER, {"content": "Hi", "role": "assistant"}, AND | {"name": "Ann"}]},
    ),
    "litellm, no effort": (CHAT, LITELLM | {"reasoning_effort": "none"}),
    "litellm, vLLM's fields": (
        CHAT, LITELLM | {"top_k": 3, "chat_template_kwargs": {"enable_thinking": False}}
    ),
    "litellm, a completion": (TEXT, {"model": M, "prompt": "Once", "max_tokens": 8}),
    "llama_index": (CHAT, LLAMA_INDEX),
    "llama_index, streamed": (CHAT, LLAMA_INDEX | {"stream": True}),
    "llama_index, a completion": (
        TEXT, {"model": M, "prompt": "Once", "max_tokens": 8, "stream": False, "temperature": 0.0}
    ),
    "lm_eval, a chat": (CHAT, LM_EVAL | {"messages": [USER], "stop": ["\n"]}),
    "lm_eval, a completion": (TEXT, LM_EVAL | {"prompt": [[418, 436]], "stop": ["\n", "<|endoftext|>"]}),
    "lm_eval, a likelihood": (
        TEXT, LM_EVAL | {"prompt": [[418, 436, 261, 388]], "max_tokens": 1, "logprobs": 1, "echo": True}
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    log = tmp_path_factory.mktemp("habits") / "server.log"
    with served(log, "--model", M, "--max-model-len", "128") as (url, _), http(url) as client:
        yield client


def texts(answer, path: str, stream: bool) -> list[str]:
    """The texts of an answer, whole or streamed."""
    assert answer.status_code == 200, answer.text
    if not stream:
        if path == RESPONSES:
            return [answer.json()["output"][0]["content"][0]["text"]]
        choices = answer.json()["choices"]
        return [choice["message"]["content"] if path == CHAT else choice["text"] for choice in choices]
    events = [line[6:] for line in answer.text.split("\n") if line.startswith("data: ")]
    if path == RESPONSES:
        return ["".join(json.loads(event).get("delta", "") for event in events)]
    assert events.pop() == "[DONE]"
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return ["".join(choice["delta"]["content"] for choice in choices)]


def prompt_of(path: str, body: dict) -> str:
    """The prompt that a body of a chat or a response should become."""
    given = body["messages"] if path == CHAT else body["input"]
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if body.get("instructions"):
        given = [{"role": "system", "content": body["instructions"]}, *given]
    turns = []
    for message in given:
        content = message["content"]
        content = content[0]["text"] if isinstance(content, list) else content
        turns.append({"role": message["role"], "content": content or ""})
    return TEMPLATE.render(turns)


@pytest.mark.parametrize("name", HABITS)
def test_what_a_client_sends_by_habit_is_answered(client, name):
    """What asks for nothing changes nothing: a greedy answer is that to the plain prompt."""
    path, body = HABITS[name]
    said = texts(client.post(path, json=body), path, bool(body.get("stream")))
    assert all(said)
    if path != TEXT and body.get("temperature") == 0:
        plain = {"model": M, "prompt": prompt_of(path, body), "max_tokens": 8, "temperature": 0}
        plain |= {"stop": body["stop"]} if body.get("stop") else {}
        assert said == [client.post(TEXT, json=plain).json()["choices"][0]["text"]]
