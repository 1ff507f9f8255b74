"""The answers of the completions routes, as /openapi.json describes them. Part 4.

The routes write answers as plain dictionaries and do not use these models. A fuzzer compares the answers with
the description. If you add a field to an answer, add the field here, too.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from engine.decoding.outputs import FinishReason
from engine.server.errors import ErrorBody, plain_schema


class ResponseFields(BaseModel):
    """A JSON object with these fields and no others."""

    model_config = ConfigDict(extra="forbid")


class PromptTokensDetails(ResponseFields):
    cached_tokens: int  # prompt tokens whose keys and values were in the cache (Part 12)


class UsageInfo(BaseModel):
    """Numbers of tokens. Extra fields are allowed: Part 19 adds costs."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class CompletionLogprobs(ResponseFields):
    """Four lists with one entry for each token (Part 10)."""

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
    stop_reason: int | str | None
    token_ids: list[int] | None = None  # this and the next: only if the body has return_token_ids
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] = []  # only if the body asks for them


class CompletionResponse(ResponseFields):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[CompletionChoice]
    usage: UsageInfo


class ModelCard(ResponseFields):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    parent: str | None  # of an adapter: the model that the adapter changes (Part 18)
    root: str | None = None  # what is served under the name `id`
    max_model_len: int | None = None  # tokens of the longest prompt with its answer


class ModelList(ResponseFields):
    object: Literal["list"]
    data: list[ModelCard]


class VersionResponse(ResponseFields):
    version: str


class HealthResponse(ResponseFields):
    status: Literal["ok", "down"]


class CompletionChunk(ResponseFields):
    """One event of a stream, with what is new. If usage was asked for, the last event has it, and in the
    others it is null; with `continuous_usage_stats`, each event has the usage so far.
    """

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[CompletionChoice]
    usage: UsageInfo | None = None


# The description of /health's answer with status 503.
DOWN = {"model": HealthResponse | ErrorBody, "description": "Requests cannot be served"}


def openapi_responses(
    answer: type[BaseModel] | None, *events: type[BaseModel]
) -> dict[int | str, dict[str, Any]]:
    """The description of a route's answers with status 200, for FastAPI's `responses`.

    `answer` is the model of a whole answer; None if the route only streams. `events` are the models of the
    events in a stream, which may end with [DONE]; none if the route does not stream.
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
