"""The HTTP server: OpenAI's completions API in front of any `Backend`. Part 4.

Promises OpenAI's shapes, that a token is sent as soon as the backend gives it, and that work stops when the
client leaves. Knows nothing of models or scheduling. Later parts add routes through `extensions`.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from functools import cache
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from engine.decoding.outputs import RequestOutput
from engine.decoding.params import ParameterError, SamplingParams
from engine.decoding.prompts import Prompt
from engine.machine.version import ruvon_version
from engine.server import errors, responses, sse
from engine.server.backend import Backend, OutputStream
from engine.server.completion_answer import stream_chunks, whole_response
from engine.server.docs_page import HEADERS as docs_headers
from engine.server.docs_page import docs_page
from engine.server.errors import RequestError, as_request_error, request_id
from engine.server.gates import (
    ApiKey,
    BodyLimit,
    Head,
    KnownHost,
    RequestId,
    RequestLimit,
    UnderPath,
    chosen_id,
    host_names,
)
from engine.server.limits import MAX_BODY_BYTES, MAX_REQUESTS
from engine.server.protocol import Body, CompletionRequest, Completions, SamplingFields
from engine.server.responses import openapi_responses
from engine.server.structured_fields import as_sent

Extension = Callable[[FastAPI, Backend], None]  # adds routes or middleware to the app
OPEN_PATHS = frozenset(["/health", "/ping"])


def no_details(name: str) -> dict[str, Any]:
    """The default `details_of` of `create_app`."""
    return {}


def create_app(
    backend: Backend,
    extensions: Sequence[Extension] = (),
    api_key: str | None = None,
    open_paths: Collection[str] = (),
    allowed_hosts: Collection[str] = (),
    max_body_bytes: int = MAX_BODY_BYTES,
    max_requests: int = MAX_REQUESTS,
    api: Completions[CompletionRequest] | None = None,
    details_of: Callable[[str], dict[str, Any]] = no_details,
    root_path: str = "",
) -> FastAPI:
    """The server's app.

    extensions: functions that add routes to the app; each is called with the app and `backend`.
    api_key: if given, every route needs `Authorization: Bearer <key>`, except OPEN_PATHS and `open_paths`.
    open_paths: paths of extensions that are answered without the key.
    allowed_hosts: if given, the Host header of a request must match one of these names (see `KnownHost`).
    max_body_bytes: the largest body; a larger one gets a 413.
    max_requests: how many requests may be under way at once; the next one gets a 503.
    api: turns the body of a completion into parameters, and outputs into JSON; by default `Completions()`.
    details_of: fields of a model's card in /v1/models that only the engine knows, such as `max_model_len`.
    root_path: a prefix under which a proxy shows the app; paths with it and without it are answered.

    Raises ValueError if `api_key` is empty, or if an allowed host is not a host name.
    """
    if api_key is not None and not api_key.strip():
        raise ValueError("api_key is empty: leave it out to serve without one")

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        """Start the backend (such as Part 6's thread) with the server, and stop it with the server."""
        async with backend:
            yield

    # `openapi_url=None` removes FastAPI's own routes: its documentation pages load scripts from another host
    # into this origin, and its /openapi.json is serialized anew for each request.
    app = FastAPI(
        title="ruvon",
        lifespan=lifespan,
        responses=errors.RESPONSES,
        openapi_url=None,
        servers=[{"url": root_path}] if root_path else None,
    )
    app.state.several_prompts = asyncio.Lock()  # held while a request with several prompts is admitted
    errors.install(app)
    _add_middleware(app, api_key, OPEN_PATHS | set(open_paths), allowed_hosts, max_body_bytes, max_requests)
    _add_routes(app, backend, api or Completions(), details_of)
    for extend in extensions:
        extend(app, backend)
    if root_path:
        app.add_middleware(UnderPath, prefix=root_path)
    return app


def _add_middleware(
    app: FastAPI,
    api_key: str | None,
    open_paths: Collection[str],
    allowed_hosts: Collection[str],
    max_body_bytes: int,
    max_requests: int,
) -> None:
    """Add the middleware, from the innermost (next to the routes) to the outermost."""
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
    details_of: Callable[[str], dict[str, Any]],
) -> None:
    """Add the routes that every server has. The arguments are as in `create_app`."""
    started = int(time.time())

    def model_card(name: str) -> dict:
        card = {"id": name, "object": "model", "created": started, "owned_by": "ruvon", "parent": None}
        return card | details_of(name)

    @app.get("/health", responses=openapi_responses(responses.HealthResponse) | {503: responses.DOWN})
    async def health() -> Response:
        return JSONResponse({"status": "ok"}) if backend.health() else JSONResponse({"status": "down"}, 503)

    @app.get("/ping", response_class=Response, responses={503: {"description": "Requests cannot be served"}})
    async def ping() -> Response:
        """As /health, without a body: what SageMaker asks."""
        return Response(status_code=200 if backend.health() else 503)

    @app.get("/version", responses=openapi_responses(responses.VersionResponse))
    async def version() -> dict:
        return {"version": ruvon_version()}

    @app.get("/v1/models", responses=openapi_responses(responses.ModelList))
    async def models() -> dict:
        return {"object": "list", "data": [model_card(name) for name in backend.models()]}

    @app.get("/v1/models/{name:path}", responses=openapi_responses(responses.ModelCard))
    async def model(name: str) -> dict:
        refuse_unknown(name, backend)
        return model_card(name)

    completion = openapi_responses(responses.CompletionResponse, responses.CompletionChunk)

    @app.post("/v1/completions", response_model=None, responses=completion)
    @app.post("/completions", response_model=None, responses=completion)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        async def prompts() -> list[Prompt]:
            return body.prompts()

        return await complete(backend, request, body, prompts, api)

    # Both are made at the first request, when all extensions have added their routes.
    @cache
    def description() -> bytes:
        return bytes(JSONResponse(app.openapi()).body)

    @cache
    def page() -> bytes:
        return docs_page(app.openapi()).encode()

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return Response(page(), media_type="text/html", headers=docs_headers)

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
    """Check a request, admit all its prompts to `backend`, and answer with the outputs, whole or as a stream.

    `read_prompts` returns the prompts. `complete` calls `read_prompts` after it has checked all other fields,
    because reading the prompts may be slow. Raises RequestError or ParameterError if the request is refused.
    """
    if body.model is None:
        body.model = backend.models()[0]  # the base model
    refuse_unknown(body.model, backend)
    body.model = api.first_name.get(body.model, body.model)
    params, options = api.params(body), api.options(body)
    if body.request_id and not chosen_id(request.headers):
        request_id.set(body.request_id)
    envelope = {
        "id": f"{api.id_prefix}-{request_id.get()}",
        "object": api.chunk_object if body.stream else api.object,
        "created": int(time.time()),
        "model": body.model,
    }
    if api.fingerprint:
        envelope["system_fingerprint"] = api.fingerprint
    prompts = await read_prompts()
    name = f"{envelope['id']}-{uuid.uuid4().hex[:8]}"  # unique, although a client may choose an id twice
    # Two requests with several prompts, each half admitted, could take the room that the other still needs,
    # and both would be refused. So only one request with several prompts is admitted at a time.
    async with request.app.state.several_prompts if len(prompts) > 1 else nullcontext():
        streams, admitted = await _admit(backend, prompts, params, name, options, body)
    # `admitted` closes the streams at the end of this block, unless a streamed answer has taken them over.
    async with admitted:
        if body.stream:
            empty_outputs = []
            for prompt in prompts:
                prompt_ids = [] if isinstance(prompt, str) else prompt
                empty_outputs.append(RequestOutput(name, None, prompt_ids, [], finished=False))
            chunks = stream_chunks(envelope, streams, empty_outputs, params.n, body, api)
            return sse.stream(chunks, admitted.pop_all())
        outputs = await last_outputs(request, streams, body)
    return await whole_response(envelope, outputs, params.n, body, api)


async def _admit(
    backend: Backend,
    prompts: list[Prompt],
    params: SamplingParams,
    name: str,
    options: dict[str, Any],
    body: SamplingFields,
) -> tuple[list[OutputStream], AsyncExitStack]:
    """Admit all prompts to the backend, or none. Returns a stream for each prompt, and a stack that closes
    the streams.

    `name` begins the engine's ids of the requests; the number of the prompt follows. Raises RequestError or
    ParameterError if a prompt is refused.
    """
    streams: list[OutputStream] = []
    async with AsyncExitStack() as admitting:  # if a prompt is refused, this closes the streams so far
        for i, prompt in enumerate(prompts):
            try:
                stream = await backend.generate(prompt, params, f"{name}-{i}", **options)
            except ParameterError as error:
                raise as_sent(error, body) from None
            admitting.push_async_callback(stream.aclose)
            streams.append(stream)
            await asyncio.sleep(0)  # let other requests run between two prompts
        admitted = admitting.pop_all()
    return streams, admitted


async def last_outputs(
    request: Request, streams: list[OutputStream], body: SamplingFields
) -> list[RequestOutput]:
    """The last output of each stream. Raises RequestError if a stream fails, or if the client leaves."""
    try:
        return await _unless_client_leaves(request, _gather(streams))
    except Exception as error:
        # Converted here: an exception of an unknown type that leaves the route closes the connection.
        raise as_request_error(as_sent(error, body)) from error


def refuse_unknown(name: str, backend: Backend) -> None:
    """Raise RequestError 404 if the backend has no model of this name."""
    if name not in backend.models():
        names = ", ".join(backend.models())
        raise RequestError(
            404, f"model {name!r} does not exist; here are: {names}", "model", "model_not_found"
        )


async def _gather(streams: list[OutputStream]) -> list[RequestOutput]:
    """The last output of each stream. If one stream fails, cancel the others and raise the error."""

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
