"""What the chat route sends back, as the description of the API has it. Part 14; see responses.py."""

from typing import Literal

from engine.decoding.outputs import FinishReason
from engine.server.responses import ResponseFields, UsageInfo


class TopLogprob(ResponseFields):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponseFields):
    content: list[TokenLogprob]
    refusal: None


class ChatMessage(ResponseFields):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(ResponseFields):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatResponse(ResponseFields):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageInfo


class DeltaMessage(ResponseFields):
    """What is new of a message; the first says whose it is."""

    role: Literal["assistant"] | None = None
    content: str


class ChatChunkChoice(ResponseFields):
    index: int
    delta: DeltaMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatChunk(ResponseFields):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageInfo | None = None
