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


Role = Literal["system", "developer", "user", "assistant"]  # the assistant's, unless the client says other


class ChatMessage(ResponseFields):
    role: Role
    content: str
    refusal: None


class ChatChoice(ResponseFields):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
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


class DeltaMessage(ResponseFields):
    """The new part of a message. Only the first delta of a sample has a role."""

    role: Role | None = None
    content: str


class ChatChunkChoice(ResponseFields):
    index: int
    delta: DeltaMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
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
