"""POST /generate: a prompt in, words out, as little as a stream can be. Part 14.

Promises one event for each piece of text, and a last one that says why it ended. For a first client, and for
`curl -N`; whoever wants more has OpenAI's routes.
"""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from uuid import uuid4

from fastapi import FastAPI
from pydantic import StrictInt, StrictStr

from engine.decoding.outputs import FinishReason
from engine.decoding.params import SamplingParams
from engine.server import sse
from engine.server.answers import Answer, described
from engine.server.backend import Backend, OutputStream
from engine.server.protocol import Fields, Number, within


class GenerateRequest(Fields):
    prompt: within(StrictStr, minLength=1)
    max_tokens: within(StrictInt, minimum=1) | None = None
    temperature: within(Number, minimum=0, maximum=1000) | None = None


class Event(Answer):
    """What is new; the last event says why it is the last, and how many tokens there were."""

    text: str
    finish_reason: FinishReason | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


def generate(app: FastAPI, backend: Backend) -> None:
    """The route; an extension of `create_app`."""

    @app.post(
        "/generate",
        status_code=200,
        response_model=None,
        response_class=sse.EventStream,
        responses=described(None, Event),
    )
    async def generate(body: GenerateRequest) -> sse.EventStream:
        given = {"max_tokens": body.max_tokens, "temperature": body.temperature}
        params = SamplingParams(**{name: value for name, value in given.items() if value is not None})
        async with AsyncExitStack() as admitted:
            stream = await backend.generate(body.prompt, params, f"gen-{uuid4().hex}")
            admitted.push_async_callback(stream.aclose)
            return sse.stream(_events(stream), admitted.pop_all())


async def _events(stream: OutputStream) -> AsyncGenerator[dict, None]:
    """{"text": what is new}; the last event has `finish_reason` and the numbers of tokens, too."""
    shown = 0
    async for output in stream:
        (sample,) = output.outputs
        text, shown = sample.text[shown:], len(sample.text)
        if output.finished:
            numbers = {
                "prompt_tokens": len(output.prompt_token_ids),
                "completion_tokens": len(sample.token_ids),
            }
            yield {"text": text, "finish_reason": sample.finish_reason} | numbers
        elif text:
            yield {"text": text}
