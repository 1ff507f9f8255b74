"""The HTTP server: OpenAI's completions API in front of any `Backend`. Part 4.

Promises OpenAI's shapes, tokens as soon as they are there, and that a client that leaves costs nothing more.
Knows nothing of models or scheduling. Later parts add routes through `extensions`.
"""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from functools import cache

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from engine.decoding.outputs import CompletionOutput, RequestOutput
from engine.decoding.prompts import Prompt
from engine.server import errors, responses, sse
from engine.server.backend import Backend, OutputStream
from engine.server.errors import RequestError, as_request_error
from engine.server.gates import (
    ApiKey,
    BodyLimit,
    Head,
    KnownHost,
    RequestId,
    RequestLimit,
    host_names,
    yield_to_others,
)
from engine.server.limits import MAX_BODY_BYTES, MAX_REQUESTS, TURN_SECONDS
from engine.server.protocol import Body, CompletionRequest, Completions
from engine.server.responses import openapi_responses

Extension = Callable[[FastAPI, Backend], None]  # adds routes to the app
OPEN_PATHS = frozenset(["/health"])


def no_parent(name: str) -> None:
    """For `create_app`: no model is an adapter of another."""


def create_app(
    backend: Backend,
    extensions: Sequence[Extension] = (),
    api_key: str | None = None,
    open_paths: Collection[str] = (),
    allowed_hosts: Collection[str] = (),
    max_body_bytes: int = MAX_BODY_BYTES,
    max_requests: int = MAX_REQUESTS,
    api: Completions[CompletionRequest] | None = None,
    parent_of: Callable[[str], str | None] = no_parent,
) -> FastAPI:
    """The server's app.

    With `api_key`, every route but /health and `open_paths` (pages of an extension) wants
    `Authorization: Bearer <key>`. With `allowed_hosts`, a request must be meant for one of them: a page in a
    browser can send to this machine under a name of its own. `api` turns a completion's body into
    parameters and outputs into JSON. `parent_of` gives the model that an adapter changes (Part 18), and None
    for a model of its own. Raises ValueError for an empty key, and for a host that is no name.
    """
    if api_key is not None and not api_key.strip():
        raise ValueError("api_key is empty: leave it out to serve without one")

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        """The backend, such as Part 6's thread, starts and stops with the server."""
        async with backend:
            yield

    # No routes of FastAPI's own: its pages would bring scripts from another host to this origin, and its
    # description would be written anew for each request.
    app = FastAPI(title="ruvon", lifespan=lifespan, responses=errors.RESPONSES, openapi_url=None)
    app.state.several_prompts = asyncio.Lock()  # held while a request with several is admitted
    errors.install(app)
    _add_middleware(app, api_key, OPEN_PATHS | set(open_paths), allowed_hosts, max_body_bytes, max_requests)
    _add_routes(app, backend, api or Completions(), parent_of)
    for extend in extensions:
        extend(app, backend)
    return app


def _add_middleware(
    app: FastAPI,
    api_key: str | None,
    open_paths: Collection[str],
    allowed_hosts: Collection[str],
    max_body_bytes: int,
    max_requests: int,
) -> None:
    """What a request passes before its route. The one added last is passed first."""
    app.add_middleware(Head)
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes)
    app.add_middleware(RequestLimit, limit=max_requests, open_paths=open_paths)
    if api_key:
        app.add_middleware(ApiKey, key=api_key, open_paths=open_paths)
    if allowed_hosts:
        app.add_middleware(KnownHost, names=host_names(allowed_hosts))
    app.add_middleware(RequestId)


def _add_routes(
    app: FastAPI,
    backend: Backend,
    api: Completions[CompletionRequest],
    parent_of: Callable[[str], str | None],
) -> None:
    """The routes that every server has. Arguments as in `create_app`."""
    started = int(time.time())

    def model_card(name: str) -> dict:
        card = {"id": name, "object": "model", "created": started, "owned_by": "ruvon"}
        parent = parent_of(name)
        return card if parent is None else card | {"parent": parent}

    @app.get("/health", responses=openapi_responses(responses.HealthResponse) | {503: responses.DOWN})
    async def health() -> Response:
        return JSONResponse({"status": "ok"}) if backend.health() else JSONResponse({"status": "down"}, 503)

    @app.get("/v1/models", responses=openapi_responses(responses.ModelList))
    async def models() -> dict:
        return {"object": "list", "data": [model_card(name) for name in backend.models()]}

    @app.get("/v1/models/{name:path}", responses=openapi_responses(responses.ModelCard))
    async def model(name: str) -> dict:
        _refuse_unknown(name, backend)
        return model_card(name)

    completion = openapi_responses(responses.CompletionResponse, responses.CompletionChunk)

    @app.post("/v1/completions", response_model=None, responses=completion)
    @app.post("/completions", response_model=None, responses=completion)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        async def prompts() -> list[Prompt]:
            return body.prompts()

        return await complete(backend, request, body, prompts, api)

    @cache
    def description() -> bytes:
        return bytes(JSONResponse(app.openapi()).body)

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        return Response(description(), media_type="application/json")


async def complete(
    backend: Backend,
    request: Request,
    body: Body,
    read_prompts: Callable[[], Awaitable[list[Prompt]]],
    api: Completions[Body],
) -> Response:
    """Check a request, have it admitted, and answer with the engine's outputs, whole or as a stream.

    `read_prompts` gives the prompts; it is called once the rest of the body has been checked. Raises
    RequestError or ParameterError.
    """
    _refuse_unknown(body.model, backend)
    params, options = api.params(body), api.options(body)
    envelope = {
        "id": f"{api.id_prefix}-{uuid.uuid4().hex}",
        "object": api.chunk_object if body.stream else api.object,
        "created": int(time.time()),
        "model": body.model,
    }
    prompts = await read_prompts()
    # Two requests that are both half admitted could refuse one another: of those with several prompts, one at
    # a time is admitted.
    lock = request.app.state.several_prompts if len(prompts) > 1 else nullcontext()
    streams: list[OutputStream] = []
    async with lock, AsyncExitStack() as admitting:  # all prompts are admitted or none
        for i, prompt in enumerate(prompts):
            stream = await backend.generate(prompt, params, f"{envelope['id']}-{i}", **options)
            admitting.push_async_callback(stream.aclose)
            streams.append(stream)
            await asyncio.sleep(0)  # others have their turn between two of many prompts
        admitted = admitting.pop_all()
    # Closes the streams on the way out, unless a streamed answer has taken them over.
    async with admitted:
        if body.stream:
            return sse.stream(_chunks(envelope, streams, params.n, body, api), admitted.pop_all())
        try:
            outputs = await _unless_client_leaves(request, _gather(streams))
        except Exception as error:
            # Answered here: past the routes, an unknown error would also close the connection.
            raise as_request_error(error) from error
    return await _whole_response(envelope, outputs, params.n, body, api)


async def _whole_response(
    envelope: dict, outputs: list[RequestOutput], n: int, body: Body, api: Completions[Body]
) -> Response:
    """One JSON object with the choices of all prompts, n of each. It is written choice by choice: with a
    prompt's log probabilities one takes long, and between two of them others have their turn.
    """
    choices = []
    for i, output in enumerate(outputs):
        for sample in output.outputs:
            choice = {"index": i * n + sample.index} | api.choice(body, output, sample)
            choices.append(_json(choice))
            await yield_to_others()
    opening = _json(envelope).removesuffix(b"}")
    usage = _json(api.usage(body, outputs))
    content = b'%b,"choices":[%b],"usage":%b}' % (opening, b",".join(choices), usage)
    return Response(content, media_type="application/json")


def _refuse_unknown(name: str, backend: Backend) -> None:
    if name not in backend.models():
        names = ", ".join(backend.models())
        raise RequestError(
            404, f"model {name!r} does not exist; here are: {names}", "model", "model_not_found"
        )


def _json(data: dict) -> bytes:
    """`data` as an answer has it: short, in UTF-8."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


async def _gather(streams: list[OutputStream]) -> list[RequestOutput]:
    """The last output of each. When one fails, the others are not waited for."""

    async def last(outputs: OutputStream) -> RequestOutput:
        async for output in outputs:
            latest = output
        return latest

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(last(outputs)) for outputs in streams]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def _unless_client_leaves(
    request: Request, work: Awaitable[list[RequestOutput]]
) -> list[RequestOutput]:
    """What `work` gives or raises; when the client hangs up first, RequestError 499, and `work` is cancelled.

    `request.receive()` gives the server's next message about this request; "http.disconnect" is the one that
    counts; when both are there at once, the work's result does. Nothing is left running, also when this
    function itself is cancelled: `work` has unwound.
    """

    async def disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, hangup = asyncio.ensure_future(work), asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait({task, hangup}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise RequestError(499, "the client closed the connection")
    finally:
        task.cancel()
        hangup.cancel()
        await asyncio.gather(task, hangup, return_exceptions=True)


async def _chunks(
    envelope: dict,
    streams: list[OutputStream],
    n: int,
    body: Body,
    api: Completions[Body],
) -> AsyncGenerator[dict, None]:
    """OpenAI's chunks: what is new in each choice, in the order it comes; usage last, if asked for."""
    arriving: asyncio.Queue[tuple[int, RequestOutput | Exception]] = asyncio.Queue(maxsize=len(streams))
    sent: list[dict[int, CompletionOutput]] = [{} for _ in streams]  # by the sample's index, as last sent
    latest: dict[int, RequestOutput] = {}

    async def forward(i: int, stream: OutputStream) -> None:
        try:
            async for output in stream:
                await arriving.put((i, output))
        except Exception as error:
            await arriving.put((i, error))

    clock = asyncio.get_running_loop().time
    tasks = [asyncio.create_task(forward(i, stream)) for i, stream in enumerate(streams)]
    include_usage = bool(body.stream_options and body.stream_options.include_usage)
    extra = {"usage": None} if include_usage else {}
    try:
        for choice in api.opening(body):
            yield envelope | {"choices": [choice]} | extra
        while len(latest) < len(streams) or not all(output.finished for output in latest.values()):
            i, output = await arriving.get()
            turn_start = clock()
            if isinstance(output, Exception):
                raise output
            latest[i] = output
            for sample, previous in _unsent(output, sent[i]):
                choice = {"index": i * n + sample.index} | api.choice(body, output, sample, previous)
                yield envelope | {"choices": [choice]} | extra
                if clock() - turn_start > TURN_SECONDS:  # a choice with a prompt's log probabilities is long
                    await yield_to_others()
                    turn_start = clock()
        if include_usage:
            outputs = [latest[i] for i in range(len(streams))]
            yield envelope | {"choices": [], "usage": api.usage(body, outputs)}
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _unsent(
    output: RequestOutput, sent: dict[int, CompletionOutput]
) -> list[tuple[CompletionOutput, CompletionOutput | None]]:
    """The samples of `output` with something new, each with its state that was sent last, or None.

    A sample with nothing new is left out; a finished one comes once. `sent`, by the sample's index, is
    brought up to date.
    """
    unsent = []
    for sample in output.outputs:
        previous = sent.get(sample.index)
        if previous is None:
            is_new = bool(sample.text or sample.finish_reason)
        elif previous.finish_reason:
            is_new = False
        else:
            is_new = bool(len(sample.text) > len(previous.text) or sample.finish_reason)
        if is_new:
            sent[sample.index] = sample
            unsent.append((sample, previous))
    return unsent
