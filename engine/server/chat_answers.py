"""What the chat route sends back, as the description of the API has it. Part 14; see answers.py."""

from typing import Literal

from engine.decoding.outputs import FinishReason
from engine.server.answers import Answer, Usage


class Candidate(Answer):
    token: str
    logprob: float
    bytes: list[int] | None


class Token(Candidate):
    top_logprobs: list[Candidate]


class ChatLogprobs(Answer):
    content: list[Token]
    refusal: None


class ChatMessage(Answer):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Answer):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletion(Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Delta(Answer):
    """What is new of a message; the first says whose it is."""

    role: Literal["assistant"] | None = None
    content: str


class ChatDelta(Answer):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatChunk(Answer):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatDelta]
    usage: Usage | None = None
