"""What the completions routes send back, as the description of the API (/openapi.json) has it. Part 4.

Promises nothing by itself: answers are written as plain dictionaries, and a fuzzer holds them against this.
Who adds a field to an answer adds it here.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from engine.decoding.outputs import FinishReason
from engine.server.errors import ErrorBody, plain_schema


class Answer(BaseModel):
    """A JSON object with these fields and no others."""

    model_config = ConfigDict(extra="forbid")


class Usage(BaseModel):
    """More may be told (Part 19)."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Logprobs(Answer):
    """Four lists of one length (Part 10)."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptToken(Answer):
    logprob: float
    rank: int
    decoded_token: str


class Choice(Answer):
    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: FinishReason | None
    prompt_logprobs: list[dict[str, PromptToken] | None] = []  # only where they were asked for


class Completion(Answer):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: Usage


class Model(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    parent: str | None = None  # of an adapter alone: the model it changes (Part 18)


class Models(Answer):
    object: Literal["list"]
    data: list[Model]


class Health(Answer):
    status: Literal["ok", "down"]


class Chunk(Answer):
    """An event of a stream: what is new. `usage`, where it was asked for, is null but in the last."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None


DOWN = {"model": Health | ErrorBody, "description": "Requests cannot be served"}


def described(answer: type[BaseModel] | None, *events: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """A route's 200, for `responses`: a whole `answer`, or a stream of `events`, which ends with [DONE]."""
    response: dict[str, Any] = {"description": "A whole answer" if answer else "Events"}
    if answer:
        response["model"] = answer
    if events:
        told = [plain_schema(event) for event in (*events, ErrorBody)]
        data = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": told}}
        item = {"type": "object", "properties": {"data": {"anyOf": [{"const": "[DONE]"}, data]}}}
        item["required"] = ["data"]
        response["content"] = {"text/event-stream": {"schema": {"type": "array"}, "itemSchema": item}}
    return {200: response}
