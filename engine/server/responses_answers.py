"""The answers of /v1/responses, as /openapi.json describes them; see responses.py. Part 20."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from engine.server.chat_responses import TokenLogprob
from engine.server.responses import ResponseFields


class OutputText(ResponseFields):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class OutputMessage(ResponseFields):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class OutputCall(ResponseFields):
    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str  # JSON, unless the answer was cut off
    status: Literal["in_progress", "completed", "incomplete"]


class OutputReasoningText(ResponseFields):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(ResponseFields):
    id: str
    type: Literal["reasoning"]
    summary: list[Any]
    content: list[OutputReasoningText]
    status: Literal["in_progress", "completed", "incomplete"]


class InputDetails(ResponseFields):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(ResponseFields):
    reasoning_tokens: int


class ResponseUsage(BaseModel):
    """Numbers of tokens. Extra fields are allowed: Part 19 adds costs."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseFailure(ResponseFields):
    code: Literal["server_error", "invalid_prompt"]
    message: str


class IncompleteDetails(ResponseFields):
    reason: Literal["max_output_tokens"]


class ReasoningSettings(ResponseFields):
    effort: str | None
    summary: None


class ResponseAnswer(ResponseFields):
    id: str
    object: Literal["response"]
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    created_at: int
    completed_at: int | None = None  # only if the status is completed
    model: str
    output: list[OutputMessage | OutputCall | OutputReasoning]
    usage: ResponseUsage | None
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: int
    reasoning: ReasoningSettings
    text: dict[str, Any]
    metadata: dict[str, str]
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    store: Literal[False]
    previous_response_id: None
    prompt: None
    background: Literal[False]
    truncation: Literal["disabled"]
    tools: list[Any]
    tool_choice: str | dict[str, str]
    parallel_tool_calls: bool
    max_tool_calls: None
    service_tier: Literal["default"]


class ResponseEvent(BaseModel):
    """One event of a stream. Which other fields it has depends on its type."""

    model_config = ConfigDict(extra="allow")

    type: str
    sequence_number: int
