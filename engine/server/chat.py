"""OpenAI's chat API: a conversation in, a message back, whole or in deltas. Part 14.

Promises OpenAI's shapes. The model's chat template makes a prompt of a conversation; the rest is Part 4's
completion, in other JSON. Every field has its effect or is refused by name: what these models cannot do
(tools, images, audio) is no field here. Shapes: https://platform.openai.com/docs/api-reference/chat
"""

import asyncio
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    Tag,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from engine.decoding.chat_template import ChatError, ChatTemplate, chat_prompt
from engine.decoding.outputs import CompletionOutput, RequestOutput
from engine.decoding.params import MAX_LOGPROBS, ParameterError, SamplingParams
from engine.decoding.prompts import Prompt
from engine.models.config import ModelConfig
from engine.server.app import Extension, complete
from engine.server.backend import Backend
from engine.server.chat_responses import ChatChunk, ChatResponse
from engine.server.errors import RequestError
from engine.server.limits import MAX_MESSAGES, MAX_TEXT_PARTS
from engine.server.protocol import Completions, Fields, SamplingFields, bounds
from engine.server.responses import openapi_responses
from engine.server.scored import num_visible_tokens, scores_of, token_json
from engine.text.tokenizer import Tokenizer


def _content_kind(value: Any) -> str | None:
    """Which of the tags of a message's content the value is meant to be; None: none of them."""
    return "text" if isinstance(value, str) else "parts" if isinstance(value, list) else None


class TextPart(Fields):
    type: Literal["text"]
    text: StrictStr


TextParts = Annotated[list[TextPart], Field(min_length=1, max_length=MAX_TEXT_PARTS, fail_fast=True)]

NULL_SCHEMA: dict[str, list] = {"enum": [None, []]}


def _only_null(value: Any, info: ValidationInfo) -> None:
    """None, also for an empty list. Raises PydanticCustomError for anything else."""
    if value not in NULL_SCHEMA["enum"]:
        raise PydanticCustomError("not_supported", f"{info.field_name} is not supported: null is accepted")


Null = Annotated[None, BeforeValidator(_only_null), WithJsonSchema(NULL_SCHEMA)]


class Message(Fields):
    """One message of a conversation. Several text parts are joined by line breaks; `developer` is another
    name of `system`. The other fields of an answer's message may be sent back with it, if they are empty.
    """

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Annotated[StrictStr, Tag("text")] | Annotated[TextParts, Tag("parts")],
        Discriminator(_content_kind, "content_kind", "a text or a list of text parts is accepted"),
    ]
    refusal: Null = None
    annotations: Null = None
    audio: Null = None
    function_call: Null = None
    tool_calls: Null = None

    def plain(self) -> dict[str, str]:
        """{"role", "content"}, both as text: what a chat template reads."""
        content = self.content
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


TEXT_FORMAT_SCHEMA: dict[str, list] = {"enum": [None, {"type": "text"}]}


def _text_format(value: Any) -> Any:
    """None: an answer is text anyway. Raises PydanticCustomError for any other format."""
    if value in TEXT_FORMAT_SCHEMA["enum"]:
        return None
    raise PydanticCustomError("not_supported", 'only {"type": "text"} is supported')


class ChatRequest(SamplingFields):
    """POST /v1/chat/completions. OpenAI's fields, then those vLLM adds. null means: as if not given."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: Annotated[StrictInt, bounds(minimum=1)] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, bounds(minimum=0, maximum=MAX_LOGPROBS)] | None = None
    response_format: Annotated[None, BeforeValidator(_text_format), WithJsonSchema(TEXT_FORMAT_SCHEMA)] = None

    def sampling_params(self) -> SamplingParams:
        """As in SamplingFields; an answer may be as long as the model allows, unless `max_completion_tokens`
        says otherwise (or `max_tokens`, its old name).
        """
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            message = (
                f"max_tokens={old} contradicts max_completion_tokens={new}: the one is the other's old name"
            )
            raise RequestError(400, message, param="max_completion_tokens")
        if self.top_logprobs is not None:
            if not self.logprobs:
                raise RequestError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
            if not 0 <= self.top_logprobs <= MAX_LOGPROBS:
                message = (
                    f"top_logprobs={self.top_logprobs}: a whole number from 0 to {MAX_LOGPROBS} is accepted"
                )
                raise RequestError(400, message, param="top_logprobs")
        try:
            return super().sampling_params()
        except ParameterError as error:
            if error.field == "max_tokens" and new is not None:
                message = str(error).replace("max_tokens", "max_completion_tokens", 1)
                raise ParameterError("max_completion_tokens", message) from None
            raise

    def _sent_params(self) -> dict[str, Any]:
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return super()._sent_params() | {"max_tokens": max_tokens, "logprobs": logprobs}


class Chat(Completions[ChatRequest]):
    """What a chat asks of the engine, and the JSON its client gets."""

    id_prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, allow_priority: bool = False) -> None:
        super().__init__(allow_priority)
        self.tokenizer = tokenizer

    def opening(self, body: ChatRequest) -> list[dict]:
        """Who speaks, before the first word is there: a client shows that its question has arrived."""
        delta = {"role": "assistant", "content": ""}
        return [
            {"index": i, "delta": delta, "logprobs": None, "finish_reason": None} for i in range(body.n or 1)
        ]

    def choice(
        self,
        body: ChatRequest,
        output: RequestOutput,
        sample: CompletionOutput,
        previous: CompletionOutput | None = None,
    ) -> dict:
        """OpenAI's choice, but for its index: a whole `message`, or in a stream a `delta`, what is new of it.

        A delta has `content` alone: the text that `sample` has beyond `previous`, its state that was sent
        last (None: nothing was); who speaks, the opening has said. A message has role, content and `refusal`,
        which is null: models here refuse in words. `logprobs` is null unless asked for, else {"content":
        [...], "refusal": null} with a `token_json` (of `scores_of(sample, i)`) for each token that
        `num_visible_tokens` counts in `sample` and not in `previous`, with as many of the likeliest as
        `top_logprobs` says. `finish_reason` is the sample's.
        """
        text = sample.text[len(previous.text) if previous else 0 :]
        message = (
            {"content": text} if body.stream else {"role": "assistant", "content": text, "refusal": None}
        )
        logprobs = None
        if body.logprobs:
            new = range(num_visible_tokens(previous), num_visible_tokens(sample))
            n = body.top_logprobs or 0
            tokens = [token_json(self.tokenizer, scores_of(sample, i), n) for i in new]
            logprobs = {"content": tokens, "refusal": None}
        name = "delta" if body.stream else "message"
        return {name: message, "logprobs": logprobs, "finish_reason": sample.finish_reason}


def chat_routes(
    tokenizer: Tokenizer,
    config: ModelConfig,
    template: ChatTemplate | None,
    api: Chat | None = None,
) -> Extension:
    """The route. `config.max_positions` bounds prompt and answer; without a `template` the model has no chat,
    and a request is told so. `api`, by default a plain `Chat`, turns a body into parameters and outputs
    into JSON.
    """
    chat_api = api or Chat(tokenizer)

    def extend(app: FastAPI, backend: Backend) -> None:
        answers = openapi_responses(ChatResponse, ChatChunk)

        @app.post("/v1/chat/completions", response_model=None, responses=answers)
        @app.post("/chat/completions", response_model=None, responses=answers)
        async def chat_completions(body: ChatRequest, request: Request) -> Response:
            async def prompts() -> list[Prompt]:
                # Rendering and tokenizing a long conversation takes its time: others have theirs meanwhile.
                return [await asyncio.to_thread(_prompt, body, tokenizer, config, template)]

            return await complete(backend, request, body, prompts, chat_api)

    return extend


def _prompt(
    body: ChatRequest, tokenizer: Tokenizer, config: ModelConfig, template: ChatTemplate | None
) -> list[int]:
    """The conversation's token ids. Raises RequestError: the model has no template, or it refuses."""
    if template is None:
        message = f"model {body.model!r} has no chat template: use /v1/completions"
        raise RequestError(400, message, param="model")
    try:
        return chat_prompt([message.plain() for message in body.messages], template, tokenizer, config)[1]
    except (ChatError, ParameterError) as error:
        raise RequestError(400, f"messages: {error}", param="messages") from None
