"""LlamaIndex: a text, structured output, and a call of a tool, by its client for servers like OpenAI's."""

import sys

from llama_index.core.program import FunctionCallingProgram
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

base_url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
settings = {"context_window": 1024, "max_tokens": 60, "temperature": 0, "timeout": 120}
model = OpenAILike(
    "storyteller",
    api_base=base_url,
    api_key="-",
    is_chat_model=True,
    is_function_calling_model=True,
    **settings,
)


class Numbers(BaseModel):
    """Two numbers."""

    a: int = Field(ge=0, le=99)
    b: int = Field(ge=0, le=99)


def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


print("text:", model.complete("Tell me about a dog.").text[:60])

program = FunctionCallingProgram.from_defaults(
    Numbers, "How much is one and one?", llm=model, tool_required=True
)
print("structured:", program())

tool = FunctionTool.from_defaults(add, fn_schema=Numbers)
answer = model.chat_with_tools([tool], "How much is one and one?", tool_required=True)
for call in model.get_tool_calls_from_response(answer):
    print("call:", call.tool_name, call.tool_kwargs, "->", add(**call.tool_kwargs))
