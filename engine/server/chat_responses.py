"""The chat route's answers, as /openapi.json describes them; see responses.py. Part 14."""

from typing import Literal

from engine.decoding.outputs import FinishReason
from engine.server.responses import PromptLogprob, ResponseFields, UsageInfo


class TopLogprob(ResponseFields):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponseFields):
    content: list[TokenLogprob]
    refusal: None


# "assistant", unless the body asks the model to go on in another role's message (`ChatRequest.role`).
Role = Literal["system", "developer", "user", "assistant", "tool"]


class AnswerFunction(ResponseFields):
    name: str
    arguments: str  # JSON, unless the answer was cut off


class AnswerCall(ResponseFields):
    id: str
    type: Literal["function"]
    function: AnswerFunction


class ChatMessage(ResponseFields):
    """`content` is null only beside calls or thoughts, which come with Extension B."""

    role: Role
    content: str | None
    refusal: None
    reasoning: str | None = None
    tool_calls: list[AnswerCall] | None = None


class ChatChoice(ResponseFields):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | Literal["tool_calls"] | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class ChatResponse(ResponseFields):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | None = None  # only if the body has return_token_ids
    choices: list[ChatChoice]
    usage: UsageInfo
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None  # only if the body asks for them


class DeltaFunction(ResponseFields):
    name: str | None = None
    arguments: str


class DeltaCall(ResponseFields):
    """The new part of a call. Only the first has an id, a type and a name."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: DeltaFunction


class DeltaMessage(ResponseFields):
    """The new part of a message. Only the first delta of a sample has a role."""

    role: Role | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[DeltaCall] | None = None


class ChatChunkChoice(ResponseFields):
    index: int
    delta: DeltaMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | Literal["tool_calls"] | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatChunk(ResponseFields):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | None = None  # in the first chunk
    choices: list[ChatChunkChoice]
    usage: UsageInfo | None = None
