"""The middleware: request ids, allowed hosts, the API key, and limits on requests and bodies. Part 4.

Each class is plain ASGI middleware, which puts no task and no queue between a route and its client.
Middleware that wraps `receive` must pass a disconnect on; otherwise the route does not learn that the client
has left.
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

from engine.server.errors import RequestError, current_request_id
from engine.server.limits import LARGE_BODY_BYTES, PLAIN_ID

HOST = re.compile(r"\*|(\*\.)?[^\s*/:\[\]]+|\[[0-9A-Fa-f:.]+\]")  # a name, *, *.example.com or [::1]
POLICY_VIOLATION = 1008  # the close code of a refused WebSocket
# Turns of the event loop. An output passes several tasks on its way from the engine's thread to the client's
# socket: a callback, the stream's reader, the queue of a response's chunks. Each takes one turn; in all they
# take fewer than 8.
LOOP_TURNS = 8


async def yield_to_others() -> None:
    """Let the event loop send the outputs of other requests that are ready, before this request goes on."""
    for _ in range(LOOP_TURNS):
        await asyncio.sleep(0)


def chosen_id(headers: Headers) -> str | None:
    """The id that the client has chosen by the header X-Request-Id; None if the header is absent, or does not
    match PLAIN_ID.
    """
    chosen = headers.get("x-request-id", "")
    return chosen if re.fullmatch(PLAIN_ID, chosen) else None


class RequestId:
    """Gives each request an id, in `errors.current_request_id`, in the log and in the response header
    `x-request-id`.

    The id is the client's `chosen_id`. Without one it is drawn, and a route may replace it by the id in the
    body. Ids that clients choose may repeat.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        chosen = chosen_id(Headers(scope=scope)) if scope["type"] == "http" else None
        current_request_id.set(chosen or uuid.uuid4().hex)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = current_request_id.get()
            await send(message)

        await self.app(scope, receive, send_with_id)


class UnderPath:
    """Takes `prefix` off a request's path. For a proxy that shows this server under the path `prefix`, and
    passes the path on unchanged.
    """

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self.app, self.prefix = app, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan" and scope["path"].startswith(f"{self.prefix}/"):
            scope = {**scope, "path": scope["path"].removeprefix(self.prefix)}
        await self.app(scope, receive, send)


def host_names(names: Collection[str]) -> list[str]:
    """The names as a list, for `KnownHost`. Raises ValueError for a name that no Host header can match."""
    for name in names:
        if not HOST.fullmatch(name):
            raise ValueError(f"allowed_host={name!r}: a name without a port, or *.example.com, is accepted")
    return list(names)


class KnownHost:
    """Refuses a request whose Host header matches none of `names`.

    The check prevents DNS rebinding: a web page that reaches this machine under a host name of the attacker.
    Starlette's TrustedHostMiddleware checks the header; this class sends the refusal in OpenAI's shape.
    """

    def __init__(self, app: ASGIApp, names: list[str]) -> None:
        self.app, self.names = app, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if await self._is_known(scope, receive):
            return await self.app(scope, receive, send)
        if scope["type"] == "websocket":
            return await WebSocketClose(POLICY_VIOLATION)(scope, receive, send)
        message = f"host={Headers(scope=scope).get('host')!r}: this server is not asked for by that name"
        await RequestError(400, message, code="unknown_host").response()(scope, receive, send)

    async def _is_known(self, scope: Scope, receive: Receive) -> bool:
        """Whether TrustedHostMiddleware would pass the request on to an app."""
        is_known = False

        async def app(*_: object) -> None:
            nonlocal is_known
            is_known = True

        async def discard(_: Message) -> None:
            """Drop Starlette's own refusal, which is plain text."""

        await TrustedHostMiddleware(app, self.names, www_redirect=False)(scope, receive, discard)
        return is_known


class Head:
    """Answers HEAD on every route that answers GET, with the same headers. Load balancers send HEAD.

    The answer ends where its body would begin, so that a stream ends, too. The Allow header of a 405 lists
    HEAD beside GET. Source: RFC 9110, 9.3.2.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_head = scope["type"] == "http" and scope["method"] == "HEAD"
        has_ended = False  # whether the end of the answer to HEAD was sent

        async def send_changed(message: Message) -> None:
            nonlocal has_ended
            if is_head and message["type"] == "http.response.body":
                if has_ended:
                    return
                has_ended = True
                message = {**message, "body": b"", "more_body": False}
            if message["type"] == "http.response.start" and message["status"] == 405:
                headers = MutableHeaders(scope=message)
                if headers.get("allow") == "GET":
                    headers["allow"] = "GET, HEAD"
            await send(message)

        if is_head:
            scope = {**scope, "method": "GET"}
        await self.app(scope, receive, send_changed)


class ApiKey:
    """Refuses a request or WebSocket without `Authorization: Bearer <key>`, except on `open_paths`."""

    def __init__(self, app: ASGIApp, key: str, open_paths: Collection[str]) -> None:
        self.app, self.expected, self.open_paths = app, key.encode(), open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        needs_key = scope["type"] in ("http", "websocket") and scope["path"] not in self.open_paths
        if not needs_key or self._has_key(scope):
            return await self.app(scope, receive, send)
        if scope["type"] == "websocket":
            return await WebSocketClose(POLICY_VIOLATION)(scope, receive, send)
        refusal = RequestError(
            401,
            "Incorrect API key provided",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await refusal.response()(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        authorization = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = authorization.partition(b" ")
        # `compare_digest` takes the same time wherever the keys differ: the time tells nothing about the key.
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self.expected)


class RequestLimit:
    """Refuses a request while `limit` others are under way, except on `open_paths`."""

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
    """Refuses a body over `max_bytes` while the body arrives, and lets large bodies pass one at a time.

    Parsing a large JSON body blocks the event loop. After each body over LARGE_BODY_BYTES, the outputs of
    other requests are sent before the next large body is parsed, however many arrive at once.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app, self.max_bytes = app, max_bytes
        self._large_body_lock = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        num_bytes = 0

        async def receive_limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self.max_bytes:  # FastAPI turns any error but HTTPException into a 400
                raise HTTPException(413, f"the body is larger than {self.max_bytes} bytes")
            is_complete = message["type"] == "http.request" and not message.get("more_body")
            if is_complete and num_bytes > LARGE_BODY_BYTES:  # FastAPI parses the JSON when this returns
                async with self._large_body_lock:
                    await yield_to_others()
            return message

        await self.app(scope, receive_limited, send)
