"""A request that is sent to a real vLLM and to `ruvon serve`, and what many of them are made of."""

from dataclasses import dataclass, field
from typing import Any

M = "storyteller"
PROMPT = "Once upon a time"
IDS = [418, 436, 261, 388]  # the same, by storyteller's tokenizer
ASK = [{"role": "user", "content": "Tell me a story about a dog."}]
GREEDY = {"temperature": 0, "max_tokens": 12}
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather somewhere",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@dataclass(frozen=True)
class Case:
    """One HTTP request. `values`: its answer is greedy, so every value is compared, not the structure
    alone. `use`: how common the request is: much, some, rare.
    """

    name: str
    path: str
    body: Any = None
    method: str = "POST"
    raw: str | None = None  # sent as it is, in place of `body`
    headers: dict[str, str] = field(default_factory=dict)
    values: bool = True
    use: str = "some"


def variant(
    name: str,
    path: str,
    body: dict[str, Any],
    *,
    values: bool = True,
    use: str = "some",
    drop: tuple[str, ...] = (),
    **fields: Any,
) -> Case:
    """A case whose body is `body` with other `fields`, and without those in `drop`."""
    kept = {key: value for key, value in {**body, **fields}.items() if key not in drop}
    return Case(name, path, kept, values=values, use=use)
