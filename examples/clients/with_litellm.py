"""LiteLLM: a text, a call, a call in a stream, and JSON that fits a schema, by its provider hosted_vllm."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no list of prices is fetched
import litellm

base_url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
SCHEMA = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]}
ADD = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}


def ask(**fields):
    messages = [{"role": "user", "content": "How much is one and one?"}]
    asked = {"model": "hosted_vllm/storyteller", "api_base": base_url, "api_key": "-", "max_tokens": 60}
    return litellm.completion(messages=messages, temperature=0, **asked, **fields)


print("text:", ask().choices[0].message.content[:60])
calls = ask(tools=[ADD], tool_choice="required").choices[0].message.tool_calls
print("call:", calls[0].function.name, json.loads(calls[0].function.arguments))

chunks = list(ask(tools=[ADD], tool_choice="required", stream=True))
built = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
print("streamed:", built[0].function.name, json.loads(built[0].function.arguments))

schema = {"name": "numbers", "schema": SCHEMA | {"additionalProperties": False}, "strict": True}
answer = ask(response_format={"type": "json_schema", "json_schema": schema})
print("schema:", json.loads(answer.choices[0].message.content))
