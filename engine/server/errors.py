"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}. Part 4.

Promises that every error of a request is answered in this shape, that the status separates the client's
errors (4xx) from the server's (5xx), and that an answer never contains a traceback. Two routes that only ask
for the server's state, /health and /ping, have answers of their own for 503.
"""

import logging
import reprlib
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import Route

from engine.decoding.params import NoRoomError, NotFoundError, ParameterError
from engine.server.limits import MAX_MESSAGE_CHARACTERS

logger = logging.getLogger(__name__)
current_request_id: ContextVar[str] = ContextVar("current_request_id", default="req-none")
# The error's `type` by its status; RequestError.body has the types of all others.
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class RequestError(Exception):
    """A refused request: an HTTP status, and an error in OpenAI's shape.

    `message` says what was wrong and what would be accepted. `param` names the field that was wrong. `code`
    names the reason for programs. The response has `headers`, and with `retry_after` (seconds) also
    Retry-After, rounded and at least 1. Messages and params have at most MAX_MESSAGE_CHARACTERS; longer ones
    are cut.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        message = _shortened(message)  # it may quote a long value, as may `param`
        super().__init__(message)
        self.status, self.message, self.code = status, message, code
        self.param = None if param is None else _shortened(param)
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["Retry-After"] = str(max(1, round(retry_after)))

    def body(self) -> dict:
        """The body of the response, as JSON data."""
        default_type = "invalid_request_error" if self.status < 500 else "server_error"
        error_type = TYPES.get(self.status, default_type)
        return {
            "error": {"message": self.message, "type": error_type, "param": self.param, "code": self.code}
        }

    def response(self) -> JSONResponse:
        """The response, with the status and the headers."""
        return JSONResponse(self.body(), self.status, headers=self.headers)


def as_request_error(error: Exception) -> RequestError:
    """The RequestError that tells the client about `error`. Logs an exception of an unknown type."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, NotFoundError):  # an adapter is missing; clients name adapters in `model`
        return RequestError(404, str(error), param="model", code="model_not_found")
    if isinstance(error, ParameterError):
        return RequestError(400, str(error), param=error.field)
    if isinstance(error, NoRoomError):
        return RequestError(429, str(error), code="no_room", retry_after=1)
    if isinstance(error, RequestValidationError):
        return _from_validation(error)
    if isinstance(error, HTTPException):
        # FastAPI says of a body that it cannot decode only that parsing failed; the cause says where.
        if isinstance(error.__cause__, UnicodeDecodeError):
            return RequestError(400, f"the body is not valid UTF-8: {error.__cause__}")
        return RequestError(error.status_code, str(error.detail), headers=error.headers)
    # The message of an unknown exception may contain paths and data, so it goes only to the log.
    logger.error("%s failed", current_request_id.get(), exc_info=error)
    message = (
        "the engine failed while working on this request; the server's log says why, under "
        f"{current_request_id.get()}"
    )
    return RequestError(500, message, code="engine_error")


def install(app: FastAPI) -> None:
    """Register handlers with `app` that answer every error in OpenAI's shape."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, HTTPException) and error.status_code == 404:  # routes raise RequestError
            error = _no_route(app, request.url.path)
        return as_request_error(error).response()

    for kind in (RequestError, ParameterError, NoRoomError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)


def _shortened(text: str) -> str:
    """The text in at most MAX_MESSAGE_CHARACTERS. A longer one is cut, and ends in "…"."""
    return text if len(text) <= MAX_MESSAGE_CHARACTERS else text[: MAX_MESSAGE_CHARACTERS - 1] + "…"


def _from_validation(error: RequestValidationError) -> RequestError:
    """A 400 for the first of pydantic's complaints.

    The message by the complaint's `type`, where PATH is its `loc` behind "body", joined by dots:

    - json_invalid: "the body is not valid JSON: " and the `error` in its `ctx`
    - extra_forbidden: "PATH is not a field of this endpoint", with code "unknown_field"
    - missing: "PATH is required", or "a JSON body is required" if the path is empty
    - any other: "PARAM=VALUE: " and its `msg`. VALUE is its `input`, as `reprlib.repr` shortens it.

    `param` is the path's first item if that is a name, else None ("body" in a message). If `error.body` is
    bytes and not empty, the client has not declared JSON, and the message is "the body was not read as JSON:
    send Content-Type: application/json".
    """
    if isinstance(error.body, bytes) and error.body:
        return RequestError(400, "the body was not read as JSON: send Content-Type: application/json")
    first = error.errors()[0]
    path = first["loc"][1:]
    field = str(path[0]) if path and isinstance(path[0], str) else None
    match first["type"]:
        case "json_invalid":
            return RequestError(400, f"the body is not valid JSON: {first['ctx']['error']}")
        case "extra_forbidden":
            name = ".".join(map(str, path))
            message = f"{name} is not a field of this endpoint"
            return RequestError(400, message, param=field, code="unknown_field")
        case "missing":
            name = ".".join(map(str, path)) or "a JSON body"
            return RequestError(400, f"{name} is required", param=field)
    value = reprlib.repr(first.get("input"))  # short, however long the input is
    return RequestError(400, f"{field or 'body'}={value}: {first['msg']}", param=field)


def _no_route(app: FastAPI, path: str) -> RequestError:
    """The 404 for a path without a route. The message lists the app's routes."""
    # `path_format` is the path as the schema has it: {name}, where `path` may have {name:path}.
    routes = [
        route.path_format for route in app.routes if isinstance(route, Route) and route.include_in_schema
    ]
    paths = ", ".join(dict.fromkeys(routes))
    return RequestError(404, f"no route {reprlib.repr(path)}; here are {paths}, described in /openapi.json")


# What follows describes the errors for /openapi.json.


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The result of `RequestError.body`, as /openapi.json describes it."""

    error: ErrorDetail


def plain_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The model's JSON schema without references, so that another schema can contain it. The model must
    not contain itself.
    """
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})

    def resolved(value: Any) -> Any:
        if isinstance(value, dict):
            if "$ref" in value:
                name = value["$ref"].rpartition("/")[2]
                return resolved(definitions[name])
            return {name: resolved(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [resolved(inner) for inner in value]
        return value

    return resolved(schema)


def _openapi_response(description: str, **other_fields: Any) -> dict[str, Any]:
    """An error's response as /openapi.json describes it. `other_fields` may have its `headers`."""
    content = {"application/json": {"schema": ERROR_SCHEMA}}
    return {"description": description, "content": content, **other_fields}


ERROR_SCHEMA = plain_schema(ErrorBody)
SECONDS = {"description": "Seconds to wait", "schema": {"type": "integer", "minimum": 1}}
MILLISECONDS = {"description": "The same, finer (Part 15)", "schema": {"type": "integer", "minimum": 1}}
WAIT_HEADERS = {"Retry-After": SECONDS, "retry-after-ms": MILLISECONDS}
# The errors of all routes, as FastAPI's `responses` describes them.
RESPONSES: dict[int | str, dict[str, Any]] = {
    400: _openapi_response("A field is wrong or not supported; `param` names it"),
    401: _openapi_response("The API key is missing or wrong"),
    404: _openapi_response("No such model"),
    405: _openapi_response("The route does not accept this method"),
    413: _openapi_response("The body is too large"),
    429: _openapi_response("The server has no room now: try again later", headers=WAIT_HEADERS),
    500: _openapi_response("The engine failed"),
    503: _openapi_response("The server cannot serve requests now", headers=WAIT_HEADERS),
    "4XX": _openapi_response("Any other error of the client"),
}
