"""OpenAI's client: an answer parsed by pydantic, a call streamed, a response with a call."""

import sys

from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field

base_url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = OpenAI(base_url=base_url, api_key="-")
model = client.models.list().data[0].id
ask = {"model": model, "messages": [{"role": "user", "content": "Tell me about a dog."}], "max_tokens": 100}


class Animal(BaseModel):
    """An animal of a story."""

    name: str = Field(pattern="^[A-Z][a-z]{1,7}$")
    age: int = Field(ge=0, le=20)


parsed = client.chat.completions.parse(**ask, response_format=Animal)
print("parsed:", parsed.choices[0].message.parsed)

# The model must call, so the arguments fit. With "auto" they are what the model writes.
tools = [pydantic_function_tool(Animal)]
with client.chat.completions.stream(
    **ask, tools=tools, tool_choice="required", parallel_tool_calls=False
) as stream:
    for event in stream:
        if event.type == "tool_calls.function.arguments.delta":
            print(event.arguments_delta, end="|", flush=True)
    call = stream.get_final_completion().choices[0].message.tool_calls[0]
print("\nstreamed:", call.function.parsed_arguments)

function = {"type": "function", "name": "Animal", "parameters": Animal.model_json_schema(), "strict": True}
response = client.responses.create(
    model=model, input="A dog.", tools=[function], tool_choice={"type": "function", "name": "Animal"}
)
print("response:", Animal.model_validate_json(response.output[0].arguments))
print("text:", client.responses.parse(model=model, input="A dog.", text_format=Animal).output_parsed)
