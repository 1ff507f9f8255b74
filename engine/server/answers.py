"""What the completions routes send back, as the description of the API (/openapi.json) has it. Part 4.

Promises nothing by itself: answers are written as plain dictionaries, and a fuzzer holds them against this.
Who adds a field to an answer adds it here.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from engine.decoding.outputs import FinishReason
from engine.server.errors import ErrorBody


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


class Models(Answer):
    object: Literal["list"]
    data: list[Model]


class Health(Answer):
    status: Literal["ok", "down"]


DOWN = {"model": Health | ErrorBody, "description": "Requests cannot be served"}
EVENTS = {"text/event-stream": {"schema": {"type": "string"}}}


def described(model: type[BaseModel], chunk: str = "") -> dict[int | str, dict[str, Any]]:
    """The 200 of a route, for `responses`; `chunk` says what its stream's events are, where it has one."""
    response: dict[str, Any] = {"model": model, "description": "A whole answer"}
    if chunk:
        response["description"] += f", or with stream=true events: {chunk}, and in the end [DONE]"
        response["content"] = EVENTS
    return {200: response}
