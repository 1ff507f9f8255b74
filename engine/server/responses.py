"""What the completions routes send back, as the description of the API (/openapi.json) has it. Part 4.

Promises nothing by itself: answers are written as plain dictionaries, and a fuzzer holds them against this.
A field that is added to an answer is added here, too.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from engine.decoding.outputs import FinishReason
from engine.server.errors import ErrorBody, plain_schema


class ResponseFields(BaseModel):
    """A JSON object with these fields and no others."""

    model_config = ConfigDict(extra="forbid")


class UsageInfo(BaseModel):
    """Extra fields are allowed: Part 19 adds costs."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionLogprobs(ResponseFields):
    """Four lists of one length (Part 10)."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(ResponseFields):
    logprob: float
    rank: int
    decoded_token: str


class CompletionChoice(ResponseFields):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] = []  # only where they were asked for


class CompletionResponse(ResponseFields):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageInfo


class ModelCard(ResponseFields):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    parent: str | None = None  # of an adapter alone: the model it changes (Part 18)


class ModelList(ResponseFields):
    object: Literal["list"]
    data: list[ModelCard]


class HealthResponse(ResponseFields):
    status: Literal["ok", "down"]


class CompletionChunk(ResponseFields):
    """An event of a stream: what is new. `usage`, where it was asked for, is null but in the last."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageInfo | None = None


DOWN = {"model": HealthResponse | ErrorBody, "description": "Requests cannot be served"}


def openapi_responses(
    answer: type[BaseModel] | None, *events: type[BaseModel]
) -> dict[int | str, dict[str, Any]]:
    """What a route may answer with status 200, for FastAPI's `responses`: a whole `answer`, or a stream of
    `events` that ends with [DONE].
    """
    response: dict[str, Any] = {"description": "A whole answer" if answer else "Events"}
    if answer:
        response["model"] = answer
    if events:
        models: list[type[BaseModel]] = [*events, ErrorBody]
        schema = {"anyOf": [plain_schema(model) for model in models]}
        data = {"type": "string", "contentMediaType": "application/json", "contentSchema": schema}
        item = {"type": "object", "properties": {"data": {"anyOf": [{"const": "[DONE]"}, data]}}}
        item["required"] = ["data"]
        response["content"] = {"text/event-stream": {"schema": {"type": "array"}, "itemSchema": item}}
    return {200: response}
