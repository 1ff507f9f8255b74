"""The server's process: uvicorn, with a deadline for everything a client may take its time over. Part 4.

Promises that a client that sends slowly, reads slowly or does neither is cut off; that such connections, and
bodies in crumbs, keep no other client out; that a client that leaves is noticed; and that Ctrl-C or SIGTERM
ends the process, whatever clients do. The numbers are in `limits`. A client that closes its sending half
counts as one that has left: until something is written to it, the two look alike.
"""

import asyncio
import errno
import gc
import logging
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from http import HTTPStatus
from typing import cast

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from engine.server.errors import RequestError
from engine.server.limits import (
    MAX_BYTES_AHEAD,
    MAX_CHUNKS,
    MAX_CONNECTIONS,
    REQUEST_SECONDS,
    SHUTDOWN_SECONDS,
    STALL_SECONDS,
    SWITCH_SECONDS,
)

if sys.platform == "win32":
    resource = None
else:
    import resource

MAX_BACKLOG = 64  # connections that the system has accepted and asyncio has not
BACKLOGS_ACCEPTED = 3  # that asyncio may accept before the first connection above the limit is closed
OTHER_FILES = 64  # that this process may open beside its connections
WINDOWS_FILES = 512  # that `select` takes there, where the system states no limit


def max_open_files() -> int:
    """How many files this process may have open, connections among them."""
    if resource is None:
        return WINDOWS_FILES
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit  # RLIM_INFINITY is -1 on Linux


def backlog() -> int:
    """MAX_BACKLOG, or a sixteenth of this process's files where these are few: a connection needs one even if
    it is closed at once.
    """
    return max(1, min(MAX_BACKLOG, max_open_files() // 16))


def max_connections() -> int:
    """How many may be open at once: MAX_CONNECTIONS, or as many as there are files for."""
    return max(1, min(MAX_CONNECTIONS, max_open_files() - BACKLOGS_ACCEPTED * backlog() - OTHER_FILES))


class StrictConnection(h11.Connection):
    """h11's, but a body has one length and at most MAX_CHUNKS chunks; and what is wrong is remembered."""

    error: h11.RemoteProtocolError | None = None  # why the request cannot be read

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Raises h11.RemoteProtocolError."""
        try:
            event = super().next_event()
            self._check(event)
        except h11.RemoteProtocolError as error:
            self.error = error
            raise
        return event

    def _check(self, event: h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]) -> None:
        """Against bodies in crumbs: a megabyte in chunks of a byte keeps all others waiting for seconds. And
        against a body that ends in two places: a proxy may believe in the other one, and take what is behind
        it for somebody else's request (RFC 9112, 6.1).
        """
        if isinstance(event, h11.Request):
            self._chunks = 0
            if {b"content-length", b"transfer-encoding"} <= {name for name, _ in event.headers}:
                raise h11.RemoteProtocolError("Content-Length and Transfer-Encoding say two lengths")
        elif isinstance(event, h11.Data) and event.chunk_start:
            self._chunks += 1
            if self._chunks > MAX_CHUNKS:
                raise h11.RemoteProtocolError(f"a body has more than {MAX_CHUNKS} chunks")


class PatientProtocol(H11Protocol):
    """uvicorn's protocol for one connection, with a deadline for whatever its client has to do.

    uvicorn itself closes a connection that idles after an answer.
    """

    max_connections: int

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Against clients that connect and say nothing: each has a deadline, and all have a number."""
        self.conn = StrictConnection(h11.SERVER)
        super().connection_made(transport)
        self._stall_timer: asyncio.TimerHandle | None = None
        self._wait_for_request()
        if len(self.connections) > self.max_connections:
            self._close_longest_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        """The deadlines of a connection end with it."""
        super().connection_lost(exc)
        self._deadline.cancel()
        if self._stall_timer:
            self._stall_timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Go on reading while a request is being answered, up to MAX_BYTES_AHEAD of the next one: uvicorn
        would stop reading, and not notice that the client has left.
        """
        super().data_received(data)
        if self.conn.their_state is h11.DONE:
            if len(self.conn.trailing_data[0]) > MAX_BYTES_AHEAD:
                self.transport.abort()
            else:
                self.flow.resume_reading()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP ends the connection, with an error in our shape, where uvicorn's is plain text.
        Against nonsense behind a request: that is not answered a second time.
        """
        if self.cycle:
            self.cycle.disconnected = True  # the route that is at its answer need not send it
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            error = cast(StrictConnection, self.conn).error
            assert error is not None  # uvicorn calls this where `next_event` has raised it
            refusal = RequestError(error.error_status_hint, f"this is not a valid HTTP request: {error}")
            response = refusal.response()
            head = h11.Response(
                status_code=response.status_code,
                headers=[*response.raw_headers, (b"connection", b"close")],
                reason=HTTPStatus(response.status_code).phrase,
            )
            with suppress(h11.LocalProtocolError):  # the answer to a HEAD has no body
                for event in (head, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
                    self.transport.write(self.conn.send(event))
        self.transport.close()

    def waits_for_client(self) -> bool:
        """Whether it is the client's turn: no request has arrived in full."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def _close_longest_waiting(self) -> None:
        """Close the connection whose client has let us wait longest: this one, if all others are being
        served.
        """
        connections = cast(set[PatientProtocol], self.connections)  # uvicorn's; `config` makes no others
        still_open = [connection for connection in connections if not connection.transport.is_closing()]
        if len(still_open) > self.max_connections:
            waiting = [connection for connection in still_open if connection.waits_for_client()]
            min(waiting, key=lambda connection: connection.waiting_since).transport.abort()

    def _wait_for_request(self) -> None:
        self.waiting_since = self.loop.time()
        self._deadline = self.loop.call_later(REQUEST_SECONDS, self._request_is_late)

    def _request_is_late(self) -> None:
        if self.waits_for_client():
            self.transport.abort()

    def on_response_complete(self) -> None:
        """Start the deadline for the next request, which a client could send byte by byte."""
        self._deadline.cancel()
        self._wait_for_request()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Close the connection after STALL_SECONDS: an answer that its client does not read takes memory."""
        super().pause_writing()
        self._stall_timer = self.loop.call_later(STALL_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads on: the deadline of `pause_writing` ends."""
        super().resume_writing()
        if self._stall_timer:
            self._stall_timer.cancel()


def _unless_cancelled(record: logging.LogRecord) -> bool:
    """Requests that the shutdown cuts off need no traceback each."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def listen(host: str, port: int) -> list[socket.socket]:
    """Sockets for `serve`: one for each address of `host`, all of `port`; port 0 takes one that is free.

    They listen at once: until a server takes them, clients wait, and no other process can have the port.
    Raises OSError: the port is in use, or no address of `host` is this machine's.
    """
    addresses = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    no_address = OSError(errno.EADDRNOTAVAIL, "no address of this machine")
    with ExitStack() as opened:
        for family, _, _, _, (name, _, *scope) in dict.fromkeys(addresses):
            if sockets:
                port = sockets[0].getsockname()[1]
            try:
                listener = socket.create_server((name, port, *scope), family=family, backlog=backlog())
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):  # such as IPv6's
                    raise
                no_address = error
            else:
                # asyncio sets this on connections of sockets that it opened itself. Without it, an answer in
                # two writes waits 40 ms until the client has acknowledged the first.
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sockets.append(opened.enter_context(listener))
        if not sockets:
            raise no_address
        opened.pop_all()
    return sockets


class Server(uvicorn.Server):
    """uvicorn's, but a second Ctrl-C cuts off clients only: the backend is still stopped in order."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn says where it is only if it has opened the sockets itself."""
        await super().startup(sockets)
        if sockets:
            host, port = self.config.host, sockets[0].getsockname()[1]
            url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            logging.getLogger("uvicorn.error").info("Uvicorn running on %s (Press CTRL+C to quit)", url)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's; after a second Ctrl-C, requests that are still under way are cancelled first."""
        await super().shutdown(sockets)
        if self.force_exit:
            for task in self.server_state.tasks:
                task.cancel()
            await self.lifespan.shutdown()


def config(app: FastAPI, host: str, port: int, log_level: str = "info") -> uvicorn.Config:
    """How uvicorn is to serve `app`; port 0 takes a free one."""
    logging.getLogger("uvicorn.error").addFilter(_unless_cancelled)
    protocol = type("Protocol", (PatientProtocol,), {"max_connections": max_connections()})
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level=log_level,
        http=protocol,
        ws="none",  # no route here speaks it: a wish for an upgrade is passed over
        backlog=backlog(),
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )


def serve(
    app: FastAPI,
    host: str,
    port: int,
    log_level: str = "info",
    make_server: Callable[[uvicorn.Config], Server] = Server,
    sockets: list[socket.socket] | None = None,
) -> None:
    """Serve until Ctrl-C or SIGTERM; after that, answers under way have SHUTDOWN_SECONDS. Either is an end in
    good order: exit code 0. `sockets`: `listen`'s, where the port was taken before the app was made.
    """
    previous_handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    gc.collect()
    gc.freeze()  # what is loaded now stays loaded: the collector need not look at it again
    # The engine's thread asks for the interpreter after each of a step's operations. At Python's own 5 ms a
    # time, a prompt being tokenized, or a burst of requests, makes a step of 10 ms one of 300.
    sys.setswitchinterval(SWITCH_SECONDS)
    server = make_server(config(app, host, port, log_level))
    try:
        server.run(sockets)
    except KeyboardInterrupt:  # uvicorn has stopped, and passes the signal on; so it does with SIGTERM
        pass
    finally:
        signal.signal(signal.SIGTERM, previous_handler)
    if not server.started:
        sys.exit(1)  # uvicorn has logged why
