"""OpenAI's chat API: a conversation in, a message back, whole or in deltas. Part 14.

Promises OpenAI's shapes. The model's chat template turns a conversation into a prompt; the rest is Part 4's
completion with other JSON. Every field has its effect or is refused by name. The models have no tools,
images or audio; a message may have such fields with the value null or [], since clients send answers back.
Shapes: https://platform.openai.com/docs/api-reference/chat
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
    """The tag of the type that `value` (a message's content) should have; None if no type fits."""
    return "text" if isinstance(value, str) else "parts" if isinstance(value, list) else None


class TextPart(Fields):
    type: Literal["text"]
    text: StrictStr


TextParts = Annotated[list[TextPart], Field(min_length=1, max_length=MAX_TEXT_PARTS, fail_fast=True)]

NULL_SCHEMA: dict[str, list] = {"enum": [None, []]}


def _only_null(value: Any, info: ValidationInfo) -> None:
    """Return None for None and for an empty list. Raises PydanticCustomError for any other value."""
    if value not in NULL_SCHEMA["enum"]:
        raise PydanticCustomError("not_supported", f"{info.field_name} is not supported: null is accepted")


Null = Annotated[None, BeforeValidator(_only_null), WithJsonSchema(NULL_SCHEMA)]


class Message(Fields):
    """One message of a conversation.

    Several text parts are joined by line breaks. The role `developer` is another name for `system`. The
    fields from `refusal` on exist so that a client can send an answer's message back; they must be empty.
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
        """{"role": str, "content": str}, as a chat template reads it."""
        content = self.content
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


TEXT_FORMAT_SCHEMA: dict[str, list] = {"enum": [None, {"type": "text"}]}


def _text_format(value: Any) -> Any:
    """Return None for null and for {"type": "text"}. Raises PydanticCustomError for any other format."""
    if value in TEXT_FORMAT_SCHEMA["enum"]:
        return None
    raise PydanticCustomError("not_supported", 'only {"type": "text"} is supported')


class ChatRequest(SamplingFields):
    """The body of POST /v1/chat/completions. A field that is null counts as not given."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: Annotated[StrictInt, bounds(minimum=1)] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, bounds(minimum=0, maximum=MAX_LOGPROBS)] | None = None
    response_format: Annotated[None, BeforeValidator(_text_format), WithJsonSchema(TEXT_FORMAT_SCHEMA)] = None

    def sampling_params(self) -> SamplingParams:
        """As in SamplingFields. `max_tokens` is the old name of `max_completion_tokens`.

        If neither is given, only the model's length limits the answer. Also raises RequestError if both are
        given and differ, and if `top_logprobs` is out of range or given without `logprobs`.
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
    """Turns a ChatRequest into parameters for the engine, and outputs into the JSON of a chat answer."""

    id_prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"
    prompt_ids_in_choice = False

    def __init__(self, tokenizer: Tokenizer, allow_priority: bool = False) -> None:
        super().__init__(allow_priority)
        self.tokenizer = tokenizer

    def opening(self, body: ChatRequest) -> list[dict]:
        """A first chunk per sample with role and empty content, sent before the first token.

        A client can use these chunks to show that its question has arrived.
        """
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
        """OpenAI's choice without its index: {"message" or "delta", "logprobs", "finish_reason"}.

        `previous` is the same sample as it was last sent to the client; None if nothing was sent.

        - In a stream (`body.stream`), `delta` is {"content": the text of `sample` beyond `previous`}. The
          role is not repeated: the opening has sent it.
        - Otherwise, `message` is {"role": "assistant", "content": the text, "refusal": null}. `refusal` is
          always null, because these models refuse in words.
        - `logprobs` is null unless `body.logprobs` is true. Then it is {"content": [...], "refusal": null}
          with one `token_json` of `scores_of(sample, i)` for each token that `num_visible_tokens` counts in
          `sample` and not in `previous`. Each lists the `top_logprobs` likeliest tokens; none by default.
          `body.return_tokens_as_token_ids` is the last argument of `token_json`.
        - `finish_reason` is the sample's.
        """
        text = sample.text[len(previous.text) if previous else 0 :]
        message = (
            {"content": text} if body.stream else {"role": "assistant", "content": text, "refusal": None}
        )
        logprobs = None
        if body.logprobs:
            new = range(num_visible_tokens(previous), num_visible_tokens(sample))
            n = body.top_logprobs or 0
            as_ids = bool(body.return_tokens_as_token_ids)
            tokens = [token_json(self.tokenizer, scores_of(sample, i), n, as_ids) for i in new]
            logprobs = {"content": tokens, "refusal": None}
        name = "delta" if body.stream else "message"
        return {name: message, "logprobs": logprobs, "finish_reason": sample.finish_reason}


def chat_routes(
    tokenizer: Tokenizer,
    config: ModelConfig,
    template: ChatTemplate | None,
    api: Chat | None = None,
) -> Extension:
    """The chat route, as an extension of `create_app`.

    `config.max_positions` bounds prompt and answer together, in tokens. If `template` is None, every chat
    request is refused, because the model has no chat template. `api` turns a body into parameters and outputs
    into JSON; by default `Chat(tokenizer)`.
    """
    chat_api = api or Chat(tokenizer)

    def extend(app: FastAPI, backend: Backend) -> None:
        answers = openapi_responses(ChatResponse, ChatChunk)

        @app.post("/v1/chat/completions", response_model=None, responses=answers)
        @app.post("/chat/completions", response_model=None, responses=answers)
        async def chat_completions(body: ChatRequest, request: Request) -> Response:
            async def prompts() -> list[Prompt]:
                # In a thread, because a long conversation takes long to render and to tokenize.
                return [await asyncio.to_thread(_prompt, body, tokenizer, config, template)]

            return await complete(backend, request, body, prompts, chat_api)

    return extend


def _prompt(
    body: ChatRequest, tokenizer: Tokenizer, config: ModelConfig, template: ChatTemplate | None
) -> list[int]:
    """The conversation's token ids. Raises RequestError if there is no template or the template fails."""
    if template is None:
        message = f"model {body.model!r} has no chat template: use /v1/completions"
        raise RequestError(400, message, param="model")
    try:
        return chat_prompt([message.plain() for message in body.messages], template, tokenizer, config)[1]
    except (ChatError, ParameterError) as error:
        raise RequestError(400, f"messages: {error}", param="messages") from None
