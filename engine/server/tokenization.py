"""POST /tokenize and /detokenize: text to token ids and back, with vLLM's names. Part 14.

A text may have more tokens than the model can read, because clients use these routes to find out what fits.
One request at a time is turned into tokens, in a thread, so that many long texts do not slow the engine's
steps. A megabyte takes seconds: a client that has left before its turn is not served.
Shapes: https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field, StrictBool, StrictStr

from engine.decoding.chat_template import ChatTemplate, guarded_text
from engine.models.config import ModelConfig
from engine.server.app import AppExtension
from engine.server.backend import Backend
from engine.server.chat_request import Message
from engine.server.chat_tools import ChatExtension, refuse_extension_turns
from engine.server.complete import refuse_if_down, refuse_unknown_model
from engine.server.errors import RequestError
from engine.server.field_types import Name, TokenId
from engine.server.fields import Fields
from engine.server.limits import MAX_MESSAGES
from engine.server.responses import ResponseFields, openapi_responses
from engine.text.tokenizer import Tokenizer


class TokenizeRequest(Fields):
    """A text (`prompt`) or a conversation (`messages`). A field that is null counts as not given."""

    model: Name | None = None
    prompt: StrictStr | None = None
    messages: (
        Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None
    ) = None
    add_special_tokens: StrictBool | None = None  # by default those that the tokenizer puts around a text
    add_generation_prompt: StrictBool | None = None  # by default the beginning of the model's answer is added
    return_token_strs: StrictBool | None = None


class TokenizeResponse(ResponseFields):
    """The answer of POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None  # as the vocabulary's file spells them; null unless asked for


class DetokenizeRequest(Fields):
    """The body of POST /detokenize."""

    model: Name | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


class DetokenizeResponse(ResponseFields):
    """The answer of POST /detokenize."""

    prompt: str


def tokenization_routes(
    tokenizer: Tokenizer,
    config: ModelConfig,
    template: ChatTemplate | None,
    chat_extension: ChatExtension | None = None,
) -> AppExtension:
    """The two routes, as an extension of `create_app`.

    `config.max_positions` is the answers' `max_model_len`. If `template` is None, every conversation is
    refused. `chat_extension` writes the turns of tools; if it is None, they are refused.
    """

    def extend(app: FastAPI, backend: Backend) -> None:
        lock = asyncio.Lock()  # held while one request's text or tokens are converted

        @asynccontextmanager
        async def turn(request: Request) -> AsyncIterator[None]:
            """The turn of `request`: begins when all earlier requests have had theirs. Raises RequestError
            503 if the engine has ended, and 499 if the client has left before its turn.
            """
            refuse_if_down(backend)
            async with lock:
                if await request.is_disconnected():
                    raise RequestError(499, "the client closed the connection")
                yield

        @app.post(
            "/tokenize",
            summary="The token ids of a text or of a conversation",
            response_model=None,
            responses=openapi_responses(TokenizeResponse),
        )
        async def tokenize(body: TokenizeRequest, request: Request) -> Response:
            if body.model is not None:
                refuse_unknown_model(body.model, backend)
            async with turn(request):
                return await asyncio.to_thread(
                    tokenize_answer, body, tokenizer, config, template, chat_extension
                )

        @app.post(
            "/detokenize",
            summary="The text of token ids",
            response_model=None,
            responses=openapi_responses(DetokenizeResponse),
        )
        async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
            if body.model is not None:
                refuse_unknown_model(body.model, backend)
            async with turn(request):
                return await asyncio.to_thread(detokenize_answer, body, tokenizer)

    return extend


def tokenize_answer(
    body: TokenizeRequest,
    tokenizer: Tokenizer,
    config: ModelConfig,
    template: ChatTemplate | None,
    chat_extension: ChatExtension | None,
) -> JSONResponse:
    """The answer of POST /tokenize. Raises RequestError as `token_ids` does."""
    ids = token_ids(body, tokenizer, template, chat_extension)
    spellings = tokenizer.spellings(ids) if body.return_token_strs else None
    answer = {"count": len(ids), "max_model_len": config.max_positions}
    return JSONResponse(answer | {"tokens": ids, "token_strs": spellings})


def detokenize_answer(body: DetokenizeRequest, tokenizer: Tokenizer) -> JSONResponse:
    """The answer of POST /detokenize. Raises RequestError for an unknown id."""
    try:
        return JSONResponse({"prompt": tokenizer.decode(body.tokens)})
    except ValueError as error:
        raise RequestError(400, f"tokens: {error}", param="tokens") from None


def token_ids(
    body: TokenizeRequest,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    chat_extension: ChatExtension | None,
) -> list[int]:
    """The ids of the body's text or conversation. Raises RequestError for fields that contradict each other,
    for a text that is not valid Unicode, for a conversation without a template or one that the template
    refuses, and for turns of tools that are refused.
    """
    if body.prompt is not None and body.messages is None:
        return _text_ids(body, body.prompt, tokenizer)
    if body.messages is not None and body.prompt is None:
        return _conversation_ids(body, body.messages, tokenizer, template, chat_extension)
    raise RequestError(400, "one of prompt and messages is required, and not both", param="prompt")


def _text_ids(body: TokenizeRequest, text: str, tokenizer: Tokenizer) -> list[int]:
    """The ids of the body's text. Raises RequestError as `token_ids` does."""
    if body.add_generation_prompt is not None:
        message = "add_generation_prompt is for messages; prompt has none"
        raise RequestError(400, message, param="add_generation_prompt")
    try:
        return tokenizer.encode(text, add_special_tokens=body.add_special_tokens is not False)
    except ValueError as error:
        raise RequestError(400, f"prompt: {error}", param="prompt") from None


def _conversation_ids(
    body: TokenizeRequest,
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    chat_extension: ChatExtension | None,
) -> list[int]:
    """The ids of the body's conversation. Raises RequestError as `token_ids` does."""
    if body.add_special_tokens:
        message = "add_special_tokens=true is not supported for messages: the chat template writes them"
        raise RequestError(400, message, param="add_special_tokens")
    if template is None:
        raise RequestError(400, "this model has no chat template: use prompt", param="messages")
    if chat_extension is None:
        refuse_extension_turns(messages)
        template_messages: Sequence[Mapping[str, Any]] = [message.plain() for message in messages]
    else:
        template_messages = chat_extension.messages(messages, template)
    try:
        text, guard = guarded_text(
            template_messages,
            template,
            tokenizer,
            add_generation_prompt=body.add_generation_prompt is not False,
        )
        return tokenizer.encode(text, add_special_tokens=False, guard=guard)
    except ValueError as error:  # the template refuses the conversation, or a text is not valid Unicode
        raise RequestError(400, f"messages: {error}", param="messages") from None
