"""OpenAI's Responses API for text and calls of functions, without a store: POST /v1/responses. Part 20.

Promises OpenAI's objects and OpenAI's order of events. A response is a chat (Part 14) in another shape: its
conversation, parameters and prompt are those of the chat that `ResponsesRequest.chat` gives. No answer is
kept, so `store` is false in every answer, and no answer can be fetched, continued or deleted by its id.
Shapes: https://platform.openai.com/docs/api-reference/responses
"""

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from engine.decoding.chat_template import ChatTemplate
from engine.decoding.outputs import CompletionOutput, RequestOutput
from engine.decoding.params import ParameterError, SamplingParams
from engine.models.config import ModelConfig
from engine.server import sse
from engine.server.app import Extension, last_outputs, refuse_unknown
from engine.server.backend import Backend, OutputStream
from engine.server.chat import Chat, read_prompt
from engine.server.chat_request import ChatRequest
from engine.server.chat_tools import AnswerItems
from engine.server.errors import RequestError, as_request_error
from engine.server.fields import Fields
from engine.server.responses import openapi_responses
from engine.server.responses_answers import ResponseAnswer, ResponseEvent
from engine.server.responses_request import ResponsesRequest, with_responses_names
from engine.server.scored import num_visible_tokens, scores_of, token_json
from engine.server.structured_fields import as_sent
from engine.text.tokenizer import Tokenizer

INCOMPLETE = {"reason": "max_output_tokens"}


def responses_route(
    tokenizer: Tokenizer, config: ModelConfig, template: ChatTemplate | None, api: Chat
) -> Extension:
    """The route, as an extension of `create_app`. The arguments are as in `chat_routes`."""

    def extend(app: FastAPI, backend: Backend) -> None:
        answers = openapi_responses(ResponseAnswer, ResponseEvent)

        @app.post("/v1/responses", response_model=None, responses=answers)
        @app.post("/responses", response_model=None, responses=answers)
        async def responses(body: ResponsesRequest, request: Request) -> Response:
            model = body.model or backend.models()[0]
            refuse_unknown(model, backend)
            response_id = f"resp_{uuid.uuid4().hex}"
            async with AsyncExitStack() as admitted:
                try:
                    chat = body.chat(api.first_name.get(model, model))
                    params, options = api.params(chat), api.options(chat)
                    ids = await read_prompt(chat, tokenizer, config, template, api.extension)
                    items = api.extension.items(chat, ids) if api.extension else None
                    try:
                        stream = await backend.generate(ids, params, response_id, **options)
                    except ParameterError as error:
                        raise as_sent(error, chat) from None
                except (RequestError, ParameterError) as error:
                    raise with_responses_names(as_request_error(error)) from None
                admitted.push_async_callback(stream.aclose)
                answer = _Answer(response_id, body, chat, params, api, items)
                if body.stream:
                    return sse.EventStream(_events(answer, stream), admitted.pop_all())
                try:
                    (output,) = await last_outputs(request, [stream], chat)
                except RequestError as error:
                    raise with_responses_names(error) from None
                return JSONResponse(answer.finished(output))

    return extend


def _format(body: ResponsesRequest) -> dict[str, Any]:
    """`text.format` as the client sent it, or its default."""
    if body.text is None or body.text.format is None:
        return {"type": "text"}
    return body.text.format.model_dump(by_alias=True, exclude_none=True)


def _tool_choice(body: ResponsesRequest) -> Any:
    """`tool_choice` as the client sent it, or its default."""
    choice = body.tool_choice
    return choice.model_dump() if isinstance(choice, Fields) else choice or "auto"


class _Answer:
    """The JSON of one answer. With `items` (Extension B), they make the output; without, the output is one
    message with one part of text.
    """

    def __init__(
        self,
        response_id: str,
        body: ResponsesRequest,
        chat: ChatRequest,
        params: SamplingParams,
        api: Chat,
        items: AnswerItems | None = None,
    ) -> None:
        """`body` is the request, and `chat` the same request as a chat. `params` are the parameters that the
        engine was given. `api` is the chat API's. `items`: None for an answer that is one message.
        """
        self.id, self.message_id = response_id, f"msg_{uuid.uuid4().hex}"
        self.chat, self.api, self.items = chat, api, items
        self.settings = {  # fields that stay the same in all events of a stream
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

    def response(self, status: str, output: RequestOutput | None = None, **more: Any) -> dict:
        """The response object, with the items and the usage of `output`, if there is one."""
        items = self.output_items(output.outputs[0]) if output else []
        usage = self.usage(output) if output else None
        changing = {"output": items, "usage": usage, "error": None, "incomplete_details": None, **more}
        return {"id": self.id, "status": status, **self.settings, **changing}

    def finished(self, output: RequestOutput) -> dict:
        """The response object of a finished output."""
        match output.outputs[0].finish_reason:
            case "stop":
                return self.response("completed", output, completed_at=int(time.time()))
            case "length":
                return self.response("incomplete", output, incomplete_details=INCOMPLETE)
            case reason:  # the server has ended the request, for example because the server shuts down
                return self.failed(RequestError(503, f"the answer ended early: {reason}"), output)

    def failed(self, error: Exception, output: RequestOutput | None = None) -> dict:
        """The response object of an answer that failed after its first event."""
        request_error = with_responses_names(as_request_error(as_sent(error, self.chat)))
        code = "server_error" if request_error.status >= 500 else "invalid_prompt"
        return self.response("failed", output, error={"code": code, "message": request_error.message})

    def output_items(self, sample: CompletionOutput) -> list[dict]:
        """The response's `output`."""
        return self.items.output(sample) if self.items else [self.message(sample)]

    def message(self, sample: CompletionOutput) -> dict:
        """The answer's message: {"id", "type", "role", "status", "content": [one part]}."""
        status = "completed" if sample.finish_reason == "stop" else "incomplete"
        return self.item(status, [self.part(sample)])

    def item(self, status: str, content: list[dict]) -> dict:
        """The message with this status and content."""
        item = {"id": self.message_id, "type": "message", "role": "assistant"}
        return {**item, "status": status, "content": content}

    def part(self, sample: CompletionOutput | None = None) -> dict:
        """The message's part, with the text of `sample`; empty for None."""
        text = sample.text if sample else ""
        logprobs = self.logprobs(sample) if sample else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def logprobs(self, sample: CompletionOutput, previous: CompletionOutput | None = None) -> list[dict]:
        """A `token_json` for each token of `sample` beyond `previous`; [] if they were not asked for."""
        if not self.chat.logprobs:
            return []
        new = range(num_visible_tokens(previous), num_visible_tokens(sample))
        n = self.chat.top_logprobs or 0
        return [token_json(self.api.tokenizer, scores_of(sample, i), n) for i in new]

    def usage(self, output: RequestOutput) -> dict:
        """The numbers of tokens of the prompt and of the answer, in OpenAI's shape."""
        sample = output.outputs[0]
        num_input, num_output = len(output.prompt_token_ids), len(sample.token_ids)
        num_reasoning = self.items.num_reasoning_tokens(sample) if self.items else 0
        usage: dict[str, Any] = {
            "input_tokens": num_input,
            # Writing to the cache costs nothing here, so 0 tokens are counted for it.
            "input_tokens_details": {"cached_tokens": output.num_cached_tokens or 0, "cache_write_tokens": 0},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": num_reasoning},
            "total_tokens": num_input + num_output,
        }
        for more in self.api.more_usage:
            usage |= more([output])
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
    message = {"output_index": 0}
    part = {"item_id": answer.message_id, "output_index": 0, "content_index": 0}
    if not answer.items:
        yield {"type": "response.output_item.added", **message, "item": answer.item("in_progress", [])}
        yield {"type": "response.content_part.added", **part, "part": answer.part()}
    previous: CompletionOutput | None = None
    try:
        async for output in stream:
            sample = output.outputs[0]
            if answer.items:
                for event in answer.items.events(sample, previous):
                    yield event
            else:
                delta = sample.text[len(previous.text) if previous else 0 :]
                logprobs = answer.logprobs(sample, previous)
                if delta or logprobs:  # the tokens of a stop string have no text
                    yield {"type": "response.output_text.delta", **part, "delta": delta, "logprobs": logprobs}
            previous = sample
    except Exception as error:
        yield {"type": "response.failed", "response": answer.failed(error)}
        return
    if not answer.items:
        text, logprobs = sample.text, answer.logprobs(sample)
        yield {"type": "response.output_text.done", **part, "text": text, "logprobs": logprobs}
        yield {"type": "response.content_part.done", **part, "part": answer.part(sample)}
        yield {"type": "response.output_item.done", **message, "item": answer.message(sample)}
    response = answer.finished(output)
    yield {"type": f"response.{response['status']}", "response": response}
