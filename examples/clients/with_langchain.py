"""LangChain: structured output, a tool bound to the model, its answer sent back, and a stream."""

import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

base_url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
model = ChatOpenAI(base_url=base_url, api_key="-", model="storyteller", max_tokens=100, temperature=0)


class Animal(BaseModel):
    """An animal of a story."""

    name: str = Field(pattern="^[A-Z][a-z]{1,7}$")
    age: int = Field(ge=0, le=20)


class Numbers(BaseModel):
    a: int = Field(ge=0, le=99)
    b: int = Field(ge=0, le=99)


@tool(args_schema=Numbers)
def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


for method in ("json_schema", "function_calling"):
    print(f"{method}:", model.with_structured_output(Animal, method=method).invoke("Tell me about a dog."))

must_call = model.bind_tools([add], tool_choice="required", parallel_tool_calls=False)
question = HumanMessage("How much is one and one?")
answer = must_call.invoke([question])
print("calls:", answer.tool_calls)
results = [ToolMessage(add.invoke(call["args"]), tool_call_id=call["id"]) for call in answer.tool_calls]
print("and then:", model.bind_tools([add]).invoke([question, answer, *results]).content[:60])

whole = None
for chunk in must_call.stream([question]):
    whole = chunk if whole is None else whole + chunk
print("streamed:", whole.tool_calls)
