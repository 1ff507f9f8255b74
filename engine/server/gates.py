"""What every request passes before a route sees it: name, host, key, and bounds on how many and how large.
Large bodies pass one after the other. Part 4.

Plain ASGI, so that nothing stands between a route and its client: a gate that wraps `receive` must let a
disconnect through, or no route learns that the client has left.
"""

import asyncio
import hmac
import re
import uuid
from collections.abc import Collection

from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from engine.server.errors import RequestError, request_id
from engine.server.limits import LARGE_BODY_BYTES

HOST = re.compile(r"\*|(\*\.)?[^\s*/:\[\]]+|\[[0-9A-Fa-f:.]+\]")  # also *, *.example.com and [::1]
POLICY_VIOLATION = 1008  # why a WebSocket was closed
# Turns of the event loop. An output goes from the engine's thread to its client's socket through several
# tasks (a callback, the stream's reader, the queue of a response's chunks); each takes a turn: fewer than 8.
LOOP_TURNS = 8


async def yield_to_others() -> None:
    """Let the outputs of other requests that are there now be sent, before this request goes on."""
    for _ in range(LOOP_TURNS):
        await asyncio.sleep(0)


class RequestId:
    """Names each request: in the header `x-request-id`, and in `errors.request_id` for the log."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = f"req-{uuid.uuid4().hex}"
        request_id.set(name)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = name
            await send(message)

        await self.app(scope, receive, send_with_id)


def host_names(names: Collection[str]) -> list[str]:
    """The names as a list, for `KnownHost`. Raises ValueError for one that no Host header can match."""
    for name in names:
        if not HOST.fullmatch(name):
            raise ValueError(f"allowed_host={name!r}: a name without a port, or *.example.com, is accepted")
    return list(names)


class KnownHost:
    """Refuses a request whose Host header is none of `names`: against DNS rebinding, where a web page reaches
    this machine under a name of the attacker's. Starlette checks the header; the refusal is in our shape.
    """

    def __init__(self, app: ASGIApp, names: list[str]) -> None:
        self.app, self.names = app, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_known = False

        async def accept(*_: object) -> None:
            nonlocal is_known
            is_known = True

        async def discard(_: Message) -> None:
            """Starlette's own refusal is plain text."""

        await TrustedHostMiddleware(accept, self.names, www_redirect=False)(scope, receive, discard)
        if is_known:
            return await self.app(scope, receive, send)
        if scope["type"] == "websocket":
            return await WebSocketClose(POLICY_VIOLATION)(scope, receive, send)
        message = f"host={Headers(scope=scope).get('host')!r}: this server is not asked for by that name"
        await RequestError(400, message, code="unknown_host").response()(scope, receive, send)


class Head:
    """Answers HEAD wherever GET is answered, with the same headers: load balancers send it. The server leaves
    the body out. A 405 says that HEAD is allowed. Source: RFC 9110, 9.3.2.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_head_allowed(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 405:
                headers = MutableHeaders(scope=message)
                if headers.get("allow") == "GET":
                    headers["allow"] = "GET, HEAD"
            await send(message)

        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self.app(scope, receive, send_with_head_allowed)


class ApiKey:
    """Wants `Authorization: Bearer <key>` on every path but the open ones, of WebSockets too."""

    def __init__(self, app: ASGIApp, key: str, open_paths: Collection[str]) -> None:
        self.app, self.expected, self.open_paths = app, key.encode(), open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and scope["path"] not in self.open_paths:
            authorization = dict(scope["headers"]).get(b"authorization", b"")
            scheme, _, key = authorization.partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self.expected):
                if scope["type"] == "websocket":
                    return await WebSocketClose(POLICY_VIOLATION)(scope, receive, send)
                refusal = RequestError(
                    401,
                    "Incorrect API key provided",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                return await refusal.response()(scope, receive, send)
        await self.app(scope, receive, send)


class RequestLimit:
    """Refuses a request while `limit` others are under way. An open path is always answered."""

    def __init__(self, app: ASGIApp, limit: int, open_paths: Collection[str]) -> None:
        self.app, self.limit, self.open_paths = app, limit, open_paths
        self.under_way = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self.open_paths:
            return await self.app(scope, receive, send)
        if self.under_way >= self.limit:
            message = f"{self.limit} requests are under way already"
            refusal = RequestError(503, message, code="server_full", retry_after=1)
            return await refusal.response()(scope, receive, send)
        self.under_way += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.under_way -= 1


class BodyLimit:
    """Refuses a body over `max_bytes` while it arrives, before it is held in memory. While JSON is read, no
    other request has a turn: between two large bodies others have theirs, however many come at once.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app, self.max_bytes = app, max_bytes
        self._large = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        num_bytes = 0

        async def receive_limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self.max_bytes:  # FastAPI passes its own exception on while it reads a body
                raise HTTPException(413, f"the body is larger than {self.max_bytes} bytes")
            is_complete = not message.get("more_body")
            if is_complete and num_bytes > LARGE_BODY_BYTES:  # its JSON is read when this returns
                async with self._large:
                    await yield_to_others()
            return message

        await self.app(scope, receive_limited if scope["type"] == "http" else receive, send)
