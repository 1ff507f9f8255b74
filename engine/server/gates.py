"""What every request passes before a route sees it: the key, and a bound on the body. Part 4.

Plain ASGI, so that nothing stands between a route and its client: whoever wraps `receive` must let a
disconnect through, or nobody learns that the client has left.
"""

import hmac

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.server.errors import RequestError

OPEN_PATHS = {"/health"}


class ApiKey:
    """Wants `Authorization: Bearer <key>` on every path but /health."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self.app, self.expected = app, f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self.expected):
                refusal = RequestError(401, "Incorrect API key provided", code="invalid_api_key")
                return await refusal.response()(scope, receive, send)
        await self.app(scope, receive, send)


class BodyLimit:
    """Refuses a body over `max_bytes` while it arrives, before it is held in memory."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app, self.max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        seen = 0

        async def limited() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.max_bytes:  # FastAPI passes its own exception on while it reads a body
                raise HTTPException(413, f"the body is larger than {self.max_bytes} bytes")
            return message

        await self.app(scope, limited if scope["type"] == "http" else receive, send)
