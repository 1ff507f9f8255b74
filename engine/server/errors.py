"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}. Part 4.

Promises that whatever goes wrong with a request is answered in this one shape, with a status that says whose
fault it was, and that a traceback is never part of it.
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

from engine.decoding.params import NotFoundError, ParameterError
from engine.server.limits import MAX_MESSAGE_CHARACTERS

logger = logging.getLogger(__name__)
request_id: ContextVar[str] = ContextVar("request_id", default="req-none")  # of the request being answered
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class RequestError(Exception):
    """A request that is refused: a status, and an error in OpenAI's shape that says how to mend it.

    `retry_after`: seconds, for 429 and 503 (Part 15).
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
        message, param = _short(message), param and _short(param)  # what they quote may be long
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["Retry-After"] = str(max(1, round(retry_after)))

    def body(self) -> dict:
        fallback = "invalid_request_error" if self.status < 500 else "server_error"
        error_type = TYPES.get(self.status, fallback)
        return {
            "error": {"message": self.message, "type": error_type, "param": self.param, "code": self.code}
        }

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, headers=self.headers)


def _short(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE_CHARACTERS else text[:MAX_MESSAGE_CHARACTERS] + "…"


def as_request_error(error: Exception) -> RequestError:
    """Any exception as what the client may know of it."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, NotFoundError):  # an adapter: clients name it in `model`
        return RequestError(404, str(error), "model", "model_not_found")
    if isinstance(error, ParameterError):
        return RequestError(400, str(error), param=error.field)
    if isinstance(error, RequestValidationError):
        return _from_validation(error)
    if isinstance(error, HTTPException):
        if isinstance(error.__cause__, UnicodeDecodeError):
            return RequestError(400, f"the body is not valid UTF-8: {error.__cause__}")
        return RequestError(error.status_code, str(error.detail), headers=error.headers)
    # Its message may contain paths and data: it goes to the log only.
    name = request_id.get()
    logger.error("%s failed", name, exc_info=error)
    message = f"the engine failed while working on this request; the server's log says why, under {name}"
    return RequestError(500, message, code="engine_error")


def _from_validation(error: RequestValidationError) -> RequestError:
    """pydantic's first complaint as a 400; `param` is the body's own field it is about, or None.

    FIELD is that field, the outermost. The message is "FIELD=VALUE: COMPLAINT", a long value shortened by
    `reprlib.repr` ("body" for no field). But: "FIELD is required" for a missing one ("a JSON body" for no
    field); "FIELD is not a field of this endpoint", code "unknown_field", for an unknown one, both with
    their path (stream_options.x); "the body is not valid JSON: …" with what the reader of JSON said (the
    `ctx`). And when `error.body` is bytes, the client did not say that it sends JSON: "the body was not
    read as JSON: send Content-Type: application/json".
    """
    if isinstance(error.body, bytes) and error.body:
        return RequestError(400, "the body was not read as JSON: send Content-Type: application/json")
    first = error.errors()[0]
    path = [part for part in first["loc"] if part != "body"]
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
    value = reprlib.repr(first.get("input"))  # a short one, however long the input
    return RequestError(400, f"{field or 'body'}={value}: {first['msg']}", param=field)


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """What `RequestError.body` gives, for the description of the API."""

    error: ErrorDetail


def plain_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The model's JSON schema without references, so that it can stand in any other schema."""
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


def _openapi_response(description: str, **more: Any) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": ERROR}}, **more}


ERROR = plain_schema(ErrorBody)
SECONDS = {"description": "Seconds to wait", "schema": {"type": "integer", "minimum": 1}}
RESPONSES: dict[int | str, dict[str, Any]] = {
    400: _openapi_response("A field is wrong or not supported; `param` names it"),
    401: _openapi_response("The API key is missing or wrong"),
    404: _openapi_response("No such model"),
    405: _openapi_response("Not with this method"),
    413: _openapi_response("The body is too large"),
    429: _openapi_response("No room now: come again", headers={"Retry-After": SECONDS}),
    500: _openapi_response("The engine failed"),
    503: _openapi_response("This server cannot now", headers={"Retry-After": SECONDS}),
    "4XX": _openapi_response("Any other mistake of the client's"),
}


def _no_route(app: FastAPI, path: str) -> RequestError:
    """404 for a path that `app` does not have: the message lists those it has."""
    routes = [route.path for route in app.routes if isinstance(route, Route) and route.include_in_schema]
    paths = ", ".join(dict.fromkeys(routes))
    return RequestError(404, f"no route {reprlib.repr(path)}; here are {paths}, described in /openapi.json")


def install(app: FastAPI) -> None:
    """Answer every error of `app` in this shape."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, HTTPException) and error.status_code == 404:  # routes raise a RequestError
            error = _no_route(app, request.url.path)
        return as_request_error(error).response()

    for kind in (RequestError, ParameterError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)
