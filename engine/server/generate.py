"""POST /generate: a prompt in, words out, as little as a stream can be. Part 14.

Promises one event for each piece of text, and a last one that says why it ended. For a first client, and for
`curl -N`; whoever wants more has OpenAI's routes.
"""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from uuid import uuid4

from fastapi import FastAPI
from pydantic import StrictInt, StrictStr

from engine.decoding.params import SamplingParams
from engine.server import sse
from engine.server.backend import Backend, OutputStream
from engine.server.protocol import Fields, Number


class GenerateRequest(Fields):
    prompt: StrictStr
    max_tokens: StrictInt | None = None
    temperature: Number | None = None


def generate(app: FastAPI, backend: Backend) -> None:
    """The route; an extension of `create_app`."""

    @app.post("/generate", response_model=None, response_class=sse.EventStream)
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
