"""A server with OpenAI's chat API that says what a test wants when it wants it, and hears who leaves. It
shares no line with ours.
"""

import json
import select
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.part04.serving import DEADLINE


class Speaker:
    """Says `first`; once it may `go`, says `rest`, too. With `error`, answers with this message instead."""

    def __init__(self, first: Sequence[str] = ("Hello",), rest: Sequence[str] = (" end.",)) -> None:
        self.first, self.rest = first, rest
        self.error: str | None = None
        self.asked: list[dict] = []
        self.go, self.left, self.closing = threading.Event(), threading.Event(), threading.Event()

    @contextmanager
    def serve(self, port: int = 0) -> Iterator[str]:
        """Its URL. In the end, answers under way break off."""
        self.closing.clear()
        handler = type("Handler", (_Handler,), {"speaker": self})
        with ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
            thread = threading.Thread(target=server.serve_forever, args=[0.01])
            thread.start()
            try:
                yield f"http://127.0.0.1:{server.server_port}"
            finally:
                self.closing.set()
                server.shutdown()
                thread.join(DEADLINE)


class _Handler(BaseHTTPRequestHandler):
    speaker: Speaker

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": "m"}]})

    def do_POST(self) -> None:
        speaker = self.speaker
        speaker.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        if speaker.error:
            return self._answer(400, {"error": {"message": speaker.error}})
        self._head(200, "text/event-stream")
        for piece in speaker.first:
            self._say({"content": piece})
        while not speaker.go.is_set():
            readable, _, _ = select.select([self.connection], [], [], 0.005)
            if readable and not self.connection.recv(1, socket.MSG_PEEK):
                return speaker.left.set()
            if speaker.closing.is_set():
                return None
        for piece in speaker.rest:
            self._say({"content": piece})
        self._say({}, "stop", usage={"completion_tokens": len(speaker.first) + len(speaker.rest)})
        self.wfile.write(b"data: [DONE]\n\n")

    def _say(self, delta: dict, reason: str | None = None, **more) -> None:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        self.wfile.write(b"data: %b\n\n" % json.dumps({"choices": [choice], **more}).encode())
        self.wfile.flush()

    def _answer(self, status: int, body: dict) -> None:
        self._head(status, "application/json")
        self.wfile.write(json.dumps(body).encode())

    def _head(self, status: int, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()

    def log_message(self, *_) -> None:
        pass
