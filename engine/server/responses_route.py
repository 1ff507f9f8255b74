"""OpenAI's Responses API for text and calls of functions, without a store: POST /v1/responses. Part 20.

Promises OpenAI's objects and OpenAI's order of events. A response is a chat (Part 14) in another shape: its
conversation, parameters and prompt are those of the chat that `ResponsesRequest.chat` gives. No answer is
kept, so `store` is false in every answer, and no answer can be fetched, continued or deleted by its id.
Shapes: https://platform.openai.com/docs/api-reference/responses
"""

import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, aclosing, contextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from engine.decoding.chat_template import ChatTemplate
from engine.decoding.outputs import CompletionOutput, RequestOutput
from engine.decoding.params import ParameterError, SamplingParams
from engine.models.config import ModelConfig
from engine.server import sse
from engine.server.app import AppExtension
from engine.server.backend import Backend, OutputStream
from engine.server.chat import Chat, read_prompt
from engine.server.chat_request import ChatRequest
from engine.server.chat_tools import AnswerItems
from engine.server.complete import last_outputs, refuse_unknown_model
from engine.server.errors import RequestError, as_request_error
from engine.server.fields import Fields
from engine.server.responses import openapi_responses
from engine.server.responses_answers import ResponseAnswer, ResponseEvent
from engine.server.responses_message import MessageOutput
from engine.server.responses_request import ResponsesRequest, with_responses_names
from engine.server.structured_fields import with_sent_name
from engine.text.tokenizer import Tokenizer

INCOMPLETE = {"reason": "max_output_tokens"}


def responses_route(
    tokenizer: Tokenizer, config: ModelConfig, template: ChatTemplate | None, api: Chat
) -> AppExtension:
    """The route, as an extension of `create_app`. The arguments are as in `chat_routes`."""

    def extend(app: FastAPI, backend: Backend) -> None:
        summary = "Answer a conversation, in the shapes of OpenAI's Responses API; no answer is stored"
        answers = openapi_responses(ResponseAnswer, ResponseEvent)

        @app.post("/v1/responses", summary=summary, response_model=None, responses=answers)
        @app.post("/responses", summary=summary, response_model=None, responses=answers)
        async def responses(body: ResponsesRequest, request: Request) -> Response:
            model = backend.models()[0] if body.model is None else body.model
            refuse_unknown_model(model, backend)
            response_id = f"resp_{uuid.uuid4().hex}"
            with _names_of_this_api():
                chat = body.chat(api.name_of_alias.get(model, model))
                params, options = api.params(chat), api.options(chat)
                prompt_ids = await read_prompt(chat, tokenizer, config, template, api.extension)
                items = _items(chat, prompt_ids, api)
                try:
                    stream = await backend.generate(prompt_ids, params, response_id, **options)
                except ParameterError as error:
                    raise with_sent_name(error, chat) from None

            async with AsyncExitStack() as on_end:  # a streamed answer takes it over
                on_end.push_async_callback(stream.aclose)
                answer = _Answer(response_id, _settings(body, chat, params), chat, api, items)
                if body.stream:
                    return sse.EventStream(_events(answer, stream), on_end.pop_all())
                with _names_of_this_api():
                    (output,) = await last_outputs(request, [stream], chat)
                return JSONResponse(answer.finished(output))

    return extend


@contextmanager
def _names_of_this_api() -> Iterator[None]:
    """Turn an error within the `with` about a field of the chat into one about this API's field."""
    try:
        yield
    except (RequestError, ParameterError) as error:
        raise with_responses_names(as_request_error(error)) from None


def _items(chat: ChatRequest, prompt_token_ids: list[int], api: Chat) -> AnswerItems:
    """What makes the items of an answer to `chat`. Raises RequestError as ChatExtension.items does."""
    items = api.extension.items(chat, prompt_token_ids) if api.extension else None
    if items is not None:
        return items
    num_likeliest = (chat.top_logprobs or 0) if chat.logprobs else None
    return MessageOutput(api.tokenizer, num_likeliest)


def _format(body: ResponsesRequest) -> dict[str, Any]:
    """`text.format` as the client sent it, or its default."""
    if body.text is None or body.text.format is None:
        return {"type": "text"}
    return body.text.format.model_dump(by_alias=True, exclude_none=True)


def _tool_choice(body: ResponsesRequest) -> Any:
    """`tool_choice` as the client sent it, or its default."""
    if body.tool_choice is None:
        return "auto"
    return body.tool_choice.model_dump() if isinstance(body.tool_choice, Fields) else body.tool_choice


def _settings(body: ResponsesRequest, chat: ChatRequest, params: SamplingParams) -> dict[str, Any]:
    """The fields of a response that stay the same in all events of a stream. `chat` is `body` as a chat, and
    `params` are the parameters that the engine was given.
    """
    return {
        "object": "response",
        "created_at": int(time.time()),
        "model": chat.model,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "temperature": 1.0 if params.temperature is None else params.temperature,
        "top_p": params.top_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "top_logprobs": body.top_logprobs or 0,
        "reasoning": {"effort": chat.reasoning_effort, "summary": None},
        "text": {"format": _format(body)},
        "metadata": body.metadata or {},
        "user": body.user,
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
        "store": False,
        "previous_response_id": None,
        "prompt": None,
        "background": False,
        "truncation": "disabled",
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "tool_choice": _tool_choice(body),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "max_tool_calls": None,
        "service_tier": "default",
    }


class _Answer:
    """The JSON of one answer."""

    def __init__(
        self, response_id: str, settings: dict[str, Any], chat: ChatRequest, api: Chat, items: AnswerItems
    ) -> None:
        """`settings` are those of `_settings`. `chat` is the request as a chat, and `api` the chat API's.
        `items` makes the output.
        """
        self.id, self.settings = response_id, settings
        self.chat, self.api, self.items = chat, api, items

    def response(self, status: str, output: RequestOutput | None = None, **fields: Any) -> dict:
        """The response object, with the items and the usage of `output`, if there is an output. `fields` are
        further fields, or values in place of null.
        """
        items = self.items.output(output.outputs[0]) if output else []
        usage = self.usage(output) if output else None
        changing = {"output": items, "usage": usage, "error": None, "incomplete_details": None, **fields}
        return {"id": self.id, "status": status, **self.settings, **changing}

    def finished(self, output: RequestOutput) -> dict:
        """The response object of a finished output."""
        match output.outputs[0].finish_reason:
            case "stop":
                return self.response("completed", output, completed_at=int(time.time()))
            case "length":
                return self.response("incomplete", output, incomplete_details=INCOMPLETE)
            case reason:  # the server has ended the request, for example because it shuts down
                return self.failed(RequestError(503, f"the answer ended early: {reason}"), output)

    def failed(self, error: Exception, output: RequestOutput | None = None) -> dict:
        """The response object of an answer that failed after its first event."""
        request_error = with_responses_names(as_request_error(with_sent_name(error, self.chat)))
        code = "server_error" if request_error.status >= 500 else "invalid_prompt"
        return self.response("failed", output, error={"code": code, "message": request_error.message})

    def usage(self, output: RequestOutput) -> dict:
        """The numbers of tokens of the prompt and of the answer, in OpenAI's shape."""
        sample = output.outputs[0]
        num_input, num_output = len(output.prompt_token_ids), len(sample.token_ids)
        usage: dict[str, Any] = {
            "input_tokens": num_input,
            # Writing to the cache costs nothing here, so 0 tokens are counted for it.
            "input_tokens_details": {"cached_tokens": output.num_cached_tokens or 0, "cache_write_tokens": 0},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": self.items.num_reasoning_tokens(sample)},
            "total_tokens": num_input + num_output,
        }
        for usage_of in self.api.more_usage:
            usage |= usage_of([output])
        return usage


async def _events(answer: _Answer, stream: OutputStream) -> AsyncGenerator[str, None]:
    """The events of a streamed answer as text, numbered from 0."""
    number = 0
    async with aclosing(_event_bodies(answer, stream)) as bodies:
        async for body in bodies:
            yield f"event: {body['type']}\n" + sse.event(body | {"sequence_number": number})
            number += 1


async def _event_bodies(answer: _Answer, stream: OutputStream) -> AsyncGenerator[dict, None]:
    """The events of a streamed answer, in OpenAI's order; the last has the whole response.

    If the engine fails, the last event is `response.failed`.
    """
    yield {"type": "response.created", "response": answer.response("in_progress")}
    yield {"type": "response.in_progress", "response": answer.response("in_progress")}
    for event in answer.items.opening():
        yield event
    previous: CompletionOutput | None = None
    try:
        async for output in stream:
            sample = output.outputs[0]
            for event in answer.items.events(sample, previous):
                yield event
            previous = sample
    except Exception as error:
        yield {"type": "response.failed", "response": answer.failed(error)}
        return
    response = answer.finished(output)
    yield {"type": f"response.{response['status']}", "response": response}
