"""The HTTP server: OpenAI's completions API in front of any `Backend`. Part 4.

`create_app` puts middleware and routes together; `complete` answers a request. Knows nothing of models or
scheduling. Later parts add routes through `extensions`.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute

from engine.decoding.prompts import Prompt
from engine.machine.version import ruvon_version
from engine.server import errors, responses
from engine.server.backend import Backend
from engine.server.complete import complete, refuse_unknown_model
from engine.server.docs_page import HEADERS as DOCS_HEADERS
from engine.server.docs_page import PAGES, docs_page
from engine.server.limits import MAX_BODY_BYTES, MAX_REQUESTS
from engine.server.middleware import (
    ApiKey,
    BodyLimit,
    Head,
    KnownHost,
    RequestId,
    RequestLimit,
    UnderPath,
    host_names,
)
from engine.server.protocol import CompletionRequest, Completions
from engine.server.responses import openapi_responses

AppExtension = Callable[[FastAPI, Backend], None]  # adds routes or middleware to the app
OPEN_PATHS = frozenset(["/health", "/ping", "/docs", "/openapi.json"])  # as in vLLM


def no_details(name: str) -> dict[str, Any]:
    """The default `details_of` of `create_app`."""
    return {}


def create_app(
    backend: Backend,
    extensions: Sequence[AppExtension] = (),
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

    extensions: functions that add routes or middleware; each is called with the app and `backend`.
    api_key: if given, every route needs `Authorization: Bearer <key>`, except OPEN_PATHS and `open_paths`.
    open_paths: paths of extensions that are answered without the key, and also beyond `max_requests`.
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
    app.state.several_prompts_lock = asyncio.Lock()  # held while a request with several prompts is admitted
    errors.install(app)
    all_open_paths = OPEN_PATHS | set(open_paths)
    _add_middleware(app, api_key, all_open_paths, allowed_hosts, max_body_bytes, max_requests)
    _add_status_routes(app, backend)
    _add_model_routes(app, backend, details_of)
    _add_completions_route(app, backend, api or Completions())
    _add_description_routes(app, all_open_paths if api_key else None)
    for extend in extensions:
        extend(app, backend)
    if root_path:  # outermost, so that all other middleware sees paths without the prefix
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


def _add_status_routes(app: FastAPI, backend: Backend) -> None:
    """Add the routes that say whether requests can be served, and by which version."""
    health_answers = openapi_responses(responses.HealthResponse) | {503: responses.DOWN}

    @app.get("/health", summary="Whether requests can be served", responses=health_answers)
    async def health() -> Response:
        return JSONResponse({"status": "ok"}) if backend.health() else JSONResponse({"status": "down"}, 503)

    @app.get(
        "/ping",
        summary="As /health, without a body: what SageMaker asks",
        response_class=Response,
        responses={503: {"description": "Requests cannot be served"}},
    )
    async def ping() -> Response:
        return Response(status_code=200 if backend.health() else 503)

    @app.get(
        "/version",
        summary="The version of this package",
        responses=openapi_responses(responses.VersionResponse),
    )
    async def version() -> dict:
        return {"version": ruvon_version()}


def _add_model_routes(app: FastAPI, backend: Backend, details_of: Callable[[str], dict[str, Any]]) -> None:
    """Add the routes that list the models. `details_of` is as in `create_app`."""
    started = int(time.time())

    def model_card(name: str) -> dict:
        card = {"id": name, "object": "model", "created": started, "owned_by": "ruvon", "parent": None}
        return card | details_of(name)

    @app.get(
        "/v1/models",
        summary="The models that a request may name",
        responses=openapi_responses(responses.ModelList),
    )
    async def models() -> dict:
        return {"object": "list", "data": [model_card(name) for name in backend.models()]}

    @app.get(
        "/v1/models/{name:path}",
        summary="One of these models",
        responses=openapi_responses(responses.ModelCard),
    )
    async def model(name: str) -> dict:
        refuse_unknown_model(name, backend)
        return model_card(name)


def _add_completions_route(app: FastAPI, backend: Backend, api: Completions[CompletionRequest]) -> None:
    """Add the route that continues a text. `api` is as in `create_app`."""
    summary = "Continue a text"
    answers = openapi_responses(responses.CompletionResponse, responses.CompletionChunk)

    @app.post("/v1/completions", summary=summary, response_model=None, responses=answers)
    @app.post("/completions", summary=summary, response_model=None, responses=answers)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        async def prompts() -> list[Prompt]:
            return body.prompts()

        return await complete(backend, request, body, prompts, api)


def _add_description_routes(app: FastAPI, open_paths: Collection[str] | None) -> None:
    """Add the app's own description: as a page, and as JSON. `open_paths`: what needs no API key; None: the
    server has no key.
    """

    # `@cache`: each is made once, at the first request, when all extensions have added their routes.
    @cache
    def description() -> dict[str, Any]:
        return app.openapi() if open_paths is None else _with_key(app.openapi(), open_paths)

    @cache
    def description_json() -> bytes:
        return bytes(JSONResponse(description()).body)

    @cache
    def page() -> bytes:
        paths = {route.path for route in app.routes if isinstance(route, APIRoute)}
        pages = {path: name for path, name in PAGES.items() if path in paths}
        return docs_page(description(), pages).encode()

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return Response(page(), media_type="text/html", headers=DOCS_HEADERS)

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        return Response(description_json(), media_type="application/json")


def _with_key(description: Mapping[str, Any], open_paths: Collection[str]) -> dict[str, Any]:
    """The OpenAPI description, which also says that every route but `open_paths` needs the API key."""
    paths = {}
    for path, operations in description["paths"].items():
        if path in open_paths:
            operations = {method: operation | {"security": []} for method, operation in operations.items()}
        paths[path] = operations
    scheme = {"ApiKey": {"type": "http", "scheme": "bearer"}}
    components = description.get("components", {}) | {"securitySchemes": scheme}
    return {**description, "paths": paths, "components": components, "security": [{"ApiKey": []}]}
