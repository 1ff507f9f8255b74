"""OpenAI's chat API: a conversation in, a message back, whole or in deltas. Part 14.

Promises OpenAI's shapes. The model's chat template turns a conversation into a prompt; the rest is Part 4's
completion with other JSON. The fields of a request are in chat_request.py.
Shapes: https://platform.openai.com/docs/api-reference/chat
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from engine.decoding.chat_template import ChatError, ChatTemplate, chat_prompt
from engine.decoding.outputs import CompletionOutput, RequestOutput
from engine.decoding.params import ParameterError, SamplingParams
from engine.decoding.prompts import Prompt
from engine.models.config import ModelConfig
from engine.server.app import AppExtension
from engine.server.backend import Backend
from engine.server.chat_request import ChatRequest
from engine.server.chat_responses import ChatChunk, ChatResponse
from engine.server.chat_tools import ChatExtension, refuse_tools
from engine.server.complete import complete
from engine.server.errors import RequestError
from engine.server.protocol import Completions
from engine.server.responses import openapi_responses
from engine.server.scored import num_visible_tokens, prompt_scores_json, scores_of, token_json
from engine.text.tokenizer import Tokenizer


class Chat(Completions[ChatRequest]):
    """Turns a ChatRequest into parameters for the engine, and outputs into the JSON of a chat answer."""

    id_prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"
    prompt_ids_in_choice = False

    def __init__(self, tokenizer: Tokenizer, allow_priority: bool = False) -> None:
        super().__init__(allow_priority)
        self.tokenizer = tokenizer
        self.extension: ChatExtension | None = None  # gives tools and thoughts their effect (Extension B)

    def params(self, body: ChatRequest) -> SamplingParams:
        """As in Completions. Also raises RequestError for fields of tools and thoughts: those that the
        extension refuses or, without an extension, all that would have an effect.
        """
        params = super().params(body)
        if self.extension is None:
            refuse_tools(body)
            return params
        return self.extension.params(body, params)

    def opening(self, body: ChatRequest) -> list[dict]:
        """A choice per sample, with the role and the echoed content, for chunks that are sent before the
        first token. A client can use them to show that its question has arrived.

        The content is `body.echoed()`, which is empty by default.
        """
        delta = {"role": body.role(), "content": body.echoed()}
        return [
            {"index": i, "delta": delta, "logprobs": None, "finish_reason": None} for i in range(body.n or 1)
        ]

    def answer_fields(self, body: ChatRequest, outputs: Sequence[RequestOutput]) -> dict:
        """{"prompt_logprobs": the prompt's log probabilities} if the body asks for them, as in vLLM."""
        if body.prompt_logprobs is None:
            return {}
        return {"prompt_logprobs": prompt_scores_json(outputs[0], body.prompt_logprobs)}

    def choice(
        self,
        body: ChatRequest,
        output: RequestOutput,
        sample: CompletionOutput,
        previous: CompletionOutput | None = None,
    ) -> dict:
        """OpenAI's choice without its index: {"message" or "delta", "logprobs", "finish_reason"}.

        `previous` is the same sample as it was last sent to the client; None if nothing was sent. A `delta`,
        for a stream (`body.stream`), has as `content` what the text has beyond `previous`. A `message` has
        body.role(), body.echoed() and the text behind it, and a `refusal` that is null: these models refuse
        in words.

        `logprobs` is null unless `body.logprobs` is true. Then its `content` has a `token_json` of
        `scores_of(sample, i)` for each token that `num_visible_tokens` counts in `sample` and not in
        `previous`, with the `top_logprobs` likeliest tokens (none by default) and
        `body.return_tokens_as_token_ids` as its last argument. Its `refusal` is null.
        """
        num_sent = len(previous.text) if previous else 0  # characters
        text = sample.text[num_sent:]
        message: dict[str, Any]
        if body.stream:
            name, message = "delta", {"content": text}
        else:
            name, message = "message", {"role": body.role(), "content": body.echoed() + text, "refusal": None}
        logprobs = None
        if body.logprobs:
            new = range(num_visible_tokens(previous), num_visible_tokens(sample))
            num_likeliest = body.top_logprobs or 0
            as_ids = bool(body.return_tokens_as_token_ids)
            tokens = [token_json(self.tokenizer, scores_of(sample, i), num_likeliest, as_ids) for i in new]
            logprobs = {"content": tokens, "refusal": None}
        return {name: message, "logprobs": logprobs, "finish_reason": sample.finish_reason}

    def vllm_fields(
        self,
        body: ChatRequest,
        output: RequestOutput,
        sample: CompletionOutput,
        previous: CompletionOutput | None,
    ) -> dict:
        """As in Completions, and the fields with which the extension replaces some of `choice`'s."""
        fields = super().vllm_fields(body, output, sample, previous)
        if self.extension is not None:
            fields |= self.extension.choice_fields(body, output, sample, previous)
        return fields


def chat_routes(
    tokenizer: Tokenizer,
    config: ModelConfig,
    template: ChatTemplate | None,
    api: Chat | None = None,
) -> AppExtension:
    """The chat route, as an extension of `create_app`.

    `config.max_positions` bounds prompt and answer together, in tokens. If `template` is None, every chat
    request is refused, because the model has no chat template. `api` turns a body into parameters and outputs
    into JSON; by default `Chat(tokenizer)`.
    """
    chat_api = api or Chat(tokenizer)

    def extend(app: FastAPI, backend: Backend) -> None:
        summary = "Answer a conversation"
        answers = openapi_responses(ChatResponse, ChatChunk)

        @app.post("/v1/chat/completions", summary=summary, response_model=None, responses=answers)
        @app.post("/chat/completions", summary=summary, response_model=None, responses=answers)
        async def chat_completions(body: ChatRequest, request: Request) -> Response:
            async def prompts() -> list[Prompt]:
                return [await read_prompt(body, tokenizer, config, template, chat_api.extension)]

            return await complete(backend, request, body, prompts, chat_api)

    return extend


async def read_prompt(
    body: ChatRequest,
    tokenizer: Tokenizer,
    config: ModelConfig,
    template: ChatTemplate | None,
    extension: ChatExtension | None,
) -> list[int]:
    """As `prompt_ids`, in a thread, because a long conversation takes long to render and to tokenize.

    Before that, `extension` checks the body's tools. Raises NoRoomError, too, if too many requests wait for
    that check.
    """
    if extension is not None:
        await extension.check(body)
    return await asyncio.to_thread(prompt_ids, body, tokenizer, config, template, extension)


def prompt_ids(
    body: ChatRequest,
    tokenizer: Tokenizer,
    config: ModelConfig,
    template: ChatTemplate | None,
    extension: ChatExtension | None = None,
) -> list[int]:
    """The conversation's token ids. `extension` writes the turns of tools.

    Raises RequestError if there is no template, if it refuses the conversation or does not read
    `reasoning_effort`, and if the prompt or a turn of tools is refused. Raises ParameterError for other
    fields that `chat_prompt` refuses.
    """
    if template is None:
        message = f"model {body.model!r} has no chat template: use /v1/completions"
        raise RequestError(400, message, param="model")
    variables = _template_variables(body, template)
    messages: Sequence[Mapping[str, Any]]
    tools: list[dict[str, Any]] | None = None
    if extension is None:
        messages = [message.plain() for message in body.messages]
    else:
        messages = extension.messages(body.messages, template)
        tools = extension.tools(body)
    try:
        _, ids = chat_prompt(
            messages,
            template,
            tokenizer,
            config,
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final_message=bool(body.continue_final_message),
            add_special_tokens=bool(body.add_special_tokens),
            variables=variables,
            truncate=body.truncate_prompt_tokens,
            tools=tools,
        )
        return ids
    except ChatError as error:
        raise RequestError(400, f"messages: {error}", param="messages") from None
    except ParameterError as error:
        if error.field != "prompt":
            raise
        raise RequestError(400, f"messages: {error}", param="messages") from None


def _template_variables(body: ChatRequest, template: ChatTemplate) -> dict[str, Any]:
    """The variables that the client sets in the template. Raises RequestError for a `reasoning_effort` that
    the template does not read.
    """
    variables = dict(body.chat_template_kwargs or {})
    effort = body.reasoning_effort
    if effort is None:
        return variables
    if "reasoning_effort" in template.variables:
        variables["reasoning_effort"] = effort
    elif effort != "none":
        message = (
            f"reasoning_effort={effort!r}: the model's chat template does not read it; "
            'null or "none" is accepted'
        )
        raise RequestError(400, message, param="reasoning_effort")
    return variables
