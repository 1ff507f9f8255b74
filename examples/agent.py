"""An agent: a model that may call two tools, and a loop that runs them, against any server with OpenAI's API.

    ruvon serve storyteller --enable-auto-tool-choice --tool-call-parser json
    python examples/agent.py "What is the weather in Rome?"

storyteller has never seen a tool: its first turns must be calls, which fit the tools and are nonsense.
"""

import argparse
import json

from openai import OpenAI


def get_weather(city: str, days: int) -> str:
    """The weather of a city for the next days."""
    return f"{city}: sunny for {days} days, then rain"


def add(a: int, b: int) -> str:
    """The sum of two numbers."""
    return str(a + b)


def tool(f, **properties) -> dict:
    """What the model is told of a function, with a JSON schema of its arguments."""
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    about = {"name": f.__name__, "description": f.__doc__, "parameters": schema}
    return {"type": "function", "function": about}


CITY, NUMBER = {"enum": ["Oslo", "Rome"]}, {"type": "integer", "minimum": 0, "maximum": 99}
TOOLS = [tool(get_weather, city=CITY, days=NUMBER), tool(add, a=NUMBER, b=NUMBER)]


def run(client: OpenAI, question: str, required: int = 0, most: int = 5) -> str:
    """The answer after at most `most` turns, of which the first `required` must be calls."""
    model, messages = client.models.list().data[0].id, [{"role": "user", "content": question}]
    for turn in range(most):
        choice = "required" if turn < required else "auto" if turn < most - 1 else "none"
        asked = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 100}
        message = client.chat.completions.create(model=model, messages=messages, **asked).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            function = get_weather if call.function.name == "get_weather" else add
            result = function(**json.loads(call.function.arguments))
            print(f"{call.function.name}({call.function.arguments}) -> {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return message.content or ""


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("question")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--required", type=int, default=2, help="turns that must be calls; Qwen3: 0")
    args = parser.parse_args()
    print(run(OpenAI(base_url=args.base_url, api_key="-"), args.question, args.required))
