"""Answers one request: checks it, admits its prompts, and sends the outputs whole or as a stream. Part 4.

Promises that all prompts of a request are admitted or none, and that their streams are closed when the answer
ends, also when the client leaves. `Completions` turns bodies into parameters, and outputs into JSON.
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, nullcontext
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from engine.decoding.outputs import RequestOutput
from engine.decoding.params import ParameterError, SamplingParams
from engine.decoding.prompts import Prompt
from engine.server import sse
from engine.server.backend import Backend, OutputStream
from engine.server.completion_answer import stream_chunks, whole_response
from engine.server.errors import RequestError, as_request_error, current_request_id
from engine.server.middleware import chosen_id
from engine.server.protocol import Body, Completions, SamplingFields
from engine.server.structured_fields import with_sent_name


async def complete(
    backend: Backend,
    request: Request,
    body: Body,
    read_prompts: Callable[[], Awaitable[list[Prompt]]],
    api: Completions[Body],
) -> Response:
    """Check a request, admit all its prompts to `backend`, and answer with the outputs, whole or as a stream.

    `read_prompts` returns the prompts. `complete` calls `read_prompts` after it has checked all other fields,
    because reading the prompts may be slow. `complete` also sets `body.model` to the name that the answer
    has. Raises RequestError, ParameterError or NoRoomError if the request is refused.
    """
    if body.model is None:
        body.model = backend.models()[0]  # the base model
    refuse_unknown_model(body.model, backend)
    body.model = api.name_of_alias.get(body.model, body.model)
    params, options = api.params(body), api.options(body)
    if body.request_id and not chosen_id(request.headers):
        current_request_id.set(body.request_id)
    envelope = _envelope(body, api)
    prompts = await read_prompts()

    engine_id = f"{envelope['id']}-{uuid.uuid4().hex[:8]}"  # unique, although a client may choose an id twice
    # Two requests with several prompts, each half admitted, could take the room that the other still needs,
    # and both would be refused. So only one request with several prompts is admitted at a time.
    turn = request.app.state.several_prompts_lock if len(prompts) > 1 else nullcontext()
    async with turn:
        streams, admitted = await _admit(backend, prompts, params, engine_id, options, body)

    # `admitted` closes the streams at the end of this block, unless a streamed answer has taken them over.
    async with admitted:
        if body.stream:
            empty_outputs = [_empty_output(engine_id, prompt) for prompt in prompts]
            chunks = stream_chunks(envelope, streams, empty_outputs, params.n, body, api)
            return sse.stream(chunks, admitted.pop_all())
        outputs = await last_outputs(request, streams, body)
    return await whole_response(envelope, outputs, params.n, body, api)


async def last_outputs(
    request: Request, streams: list[OutputStream], body: SamplingFields
) -> list[RequestOutput]:
    """The last output of each stream. Raises RequestError if a stream fails, or if the client leaves."""
    try:
        return await _unless_client_leaves(request, _gather(streams))
    except Exception as error:
        # Converted here: an exception of an unknown type that leaves the route closes the connection.
        raise as_request_error(with_sent_name(error, body)) from error


def refuse_unknown_model(name: str, backend: Backend) -> None:
    """Raise RequestError 404 if the backend has no model of this name."""
    if name not in backend.models():
        message = f"model {name!r} does not exist; here are: {', '.join(backend.models())}"
        raise RequestError(404, message, param="model", code="model_not_found")


def refuse_if_down(backend: Backend) -> None:
    """Raise RequestError 503 unless the backend can serve requests. The error is that of `backend.health`, if
    it raises one.
    """
    if not backend.health():
        raise RequestError(503, "the engine has ended", code="engine_down")


def _envelope(body: Body, api: Completions[Body]) -> dict[str, Any]:
    """The fields that an answer's object, or all chunks of its stream, have in common."""
    envelope: dict[str, Any] = {
        "id": f"{api.id_prefix}-{current_request_id.get()}",
        "object": api.chunk_object if body.stream else api.object,
        "created": int(time.time()),
        "model": body.model,
    }
    if api.fingerprint:
        envelope["system_fingerprint"] = api.fingerprint
    return envelope


async def _admit(
    backend: Backend,
    prompts: list[Prompt],
    params: SamplingParams,
    engine_id: str,
    options: dict[str, Any],
    body: SamplingFields,
) -> tuple[list[OutputStream], AsyncExitStack]:
    """Admit all prompts to the backend, or none. Returns a stream for each prompt, and a stack that closes
    the streams.

    `engine_id` begins the engine's id of each prompt's request; the prompt's number follows. Raises
    RequestError, ParameterError or NoRoomError if a prompt is refused.
    """
    streams: list[OutputStream] = []
    async with AsyncExitStack() as admitting:  # if a prompt is refused, this closes the streams so far
        for i, prompt in enumerate(prompts):
            try:
                stream = await backend.generate(prompt, params, f"{engine_id}-{i}", **options)
            except (ParameterError, RequestError) as error:
                raise with_sent_name(error, body) from None
            admitting.push_async_callback(stream.aclose)
            streams.append(stream)
            await asyncio.sleep(0)  # let other requests run between two prompts
        admitted = admitting.pop_all()
    return streams, admitted


def _empty_output(engine_id: str, prompt: Prompt) -> RequestOutput:
    """An output before the first token. If the prompt is a text, its token ids are not known here."""
    prompt_ids = [] if isinstance(prompt, str) else prompt
    return RequestOutput(engine_id, None, prompt_ids, [], finished=False)


async def _gather(streams: list[OutputStream]) -> list[RequestOutput]:
    """The last output of each stream. If one stream fails, cancel the others and raise the error."""

    async def last_output(stream: OutputStream) -> RequestOutput:
        async for output in stream:
            latest = output
        return latest

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(last_output(stream)) for stream in streams]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def _unless_client_leaves(
    request: Request, work: Awaitable[list[RequestOutput]]
) -> list[RequestOutput]:
    """Return what `work` returns, or raise what `work` raises, unless the client hangs up first.

    If the client hangs up first, cancel `work` and raise RequestError 499. `await request.receive()` returns
    the server's next message about this request. A message of type "http.disconnect" means that the client
    has hung up; messages of other types are ignored. If `work` is done when the disconnect arrives, the
    result of `work` counts.

    No task is left running: when this function returns, raises or is cancelled, `work` has unwound.
    """

    async def disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(work)
    hangup = asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait({task, hangup}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise RequestError(499, "the client closed the connection")
    finally:
        task.cancel()
        hangup.cancel()
        await asyncio.gather(task, hangup, return_exceptions=True)
