"""POST /generate: the simplest stream, with a prompt in and pieces of text out. Part 14.

Promises one event for each new piece of text, and a last event with the finish reason. Meant for a first
client and for `curl -N`; OpenAI's routes have more parameters.
"""

from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack
from types import MappingProxyType
from typing import Annotated, Any
from uuid import uuid4

from fastapi import FastAPI
from pydantic import StrictStr

from engine.decoding.outputs import FinishReason
from engine.decoding.params import SamplingParams
from engine.decoding.recommended import with_recommended
from engine.server import sse
from engine.server.backend import Backend, OutputStream
from engine.server.field_types import Integer, Number, bounds
from engine.server.fields import Fields
from engine.server.responses import ResponseFields, openapi_responses


class GenerateRequest(Fields):
    """The body of POST /generate. A field that is null counts as not given."""

    prompt: Annotated[StrictStr, bounds(minLength=1)]
    max_tokens: Annotated[Integer, bounds(minimum=1)] | None = None
    temperature: Annotated[Number, bounds(minimum=0, maximum=1000)] | None = None


class GenerateEvent(ResponseFields):
    """One event: the new text. The last event also has the finish reason and the numbers of tokens."""

    text: str
    finish_reason: FinishReason | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


def generate_route(
    app: FastAPI, backend: Backend, recommended: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """An extension of `create_app`: adds the route. `recommended` are values of generation_config.json for
    parameters that a body leaves out, as in `Completions`.
    """

    @app.post(
        "/generate",
        summary="Continue a text, as the simplest stream",
        status_code=200,
        response_model=None,
        response_class=sse.EventStream,
        responses=openapi_responses(None, GenerateEvent),
    )
    async def generate(body: GenerateRequest) -> sse.EventStream:
        sent_params = body.model_dump(exclude={"prompt"}, exclude_none=True)
        params = with_recommended(SamplingParams(**sent_params), sent_params, recommended)
        async with AsyncExitStack() as admitted:
            stream = await backend.generate(body.prompt, params, f"gen-{uuid4().hex}")
            admitted.push_async_callback(stream.aclose)
            return sse.stream(_events(stream), admitted.pop_all())


async def _events(stream: OutputStream) -> AsyncGenerator[dict, None]:
    """GenerateEvents as JSON data: {"text": the new text}; the last one has all fields. Raises the stream's
    error.
    """
    num_shown = 0  # characters sent so far
    async for output in stream:
        (sample,) = output.outputs
        new_text = sample.text[num_shown:]
        num_shown = len(sample.text)
        if output.finished:
            yield {
                "text": new_text,
                "finish_reason": sample.finish_reason,
                "prompt_tokens": len(output.prompt_token_ids),
                "completion_tokens": len(sample.token_ids),
            }
        elif new_text:
            yield {"text": new_text}
