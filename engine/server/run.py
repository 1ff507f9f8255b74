"""The server's process: uvicorn, with a deadline for everything that a client has to do. Part 4.

Promises that a client that sends slowly, reads slowly or does nothing is cut off; that such clients, and
bodies in many small chunks, do not keep other clients out; that a client that leaves is noticed; and that
Ctrl-C or SIGTERM ends the process, whatever clients do. The deadlines and limits are in `limits`.

A client that closes only the sending half of its connection counts as a client that has left: until the
server writes to the connection, the server cannot tell the two apart.
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

MAX_BACKLOG = 64  # connections that the system has accepted and asyncio has not yet accepted
BACKLOGS_ACCEPTED = 3  # full backlogs that asyncio may accept before a connection above the limit is closed
OTHER_FILES = 64  # files that this process may open beside its connections
WINDOWS_FILES = 512  # files that `select` accepts on Windows, which states no limit for a process


def max_open_files() -> int:
    """How many files this process may have open. Each connection is a file."""
    if resource is None:
        return WINDOWS_FILES
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit  # RLIM_INFINITY is -1 on Linux


def backlog() -> int:
    """The backlog of a listening socket, in connections: MAX_BACKLOG, or less with few files.

    The backlog is at most a sixteenth of the process's files, because each accepted connection takes a file,
    even if the connection is closed at once.
    """
    return max(1, min(MAX_BACKLOG, max_open_files() // 16))


def max_connections() -> int:
    """How many connections may be open at once: MAX_CONNECTIONS, or fewer with few files."""
    return max(1, min(MAX_CONNECTIONS, max_open_files() - BACKLOGS_ACCEPTED * backlog() - OTHER_FILES))


class StrictConnection(h11.Connection):
    """h11's connection, which also refuses a body with two lengths or more than MAX_CHUNKS chunks.

    `error` keeps the error, which uvicorn does not pass on, for `PatientProtocol.send_400_response`.
    """

    error: h11.RemoteProtocolError | None = None  # why the request could not be read

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """The next event. Raises h11.RemoteProtocolError if the request cannot be read."""
        try:
            event = super().next_event()
            self._check(event)
        except h11.RemoteProtocolError as error:
            self.error = error
            raise
        return event

    def _check(self, event: h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]) -> None:
        """Raise h11.RemoteProtocolError for too many chunks, and for a body with two lengths.

        A body of one megabyte in chunks of one byte would block all other clients for seconds. If a request
        has both Content-Length and Transfer-Encoding, a proxy may end the body elsewhere than this server
        does, and take the rest for another client's request (RFC 9112, 6.1).
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
    """uvicorn's protocol for one connection, with a deadline for everything that the client has to do.

    uvicorn itself closes a connection that is idle after an answer.
    """

    max_connections: int

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Start the deadline for the first request, and close a connection if there are too many."""
        self.conn = StrictConnection(h11.SERVER)
        super().connection_made(transport)
        self._stall_timer: asyncio.TimerHandle | None = None
        self._wait_for_request()
        if len(self.connections) > self.max_connections:
            self._close_longest_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadlines of this connection, which is closed."""
        super().connection_lost(exc)
        self._deadline.cancel()
        if self._stall_timer:
            self._stall_timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Read on while a request is being answered, up to MAX_BYTES_AHEAD bytes of the next request.

        uvicorn would stop reading, and would not notice that the client has left.
        """
        super().data_received(data)
        if self.conn.their_state is h11.DONE:
            if len(self.conn.trailing_data[0]) > MAX_BYTES_AHEAD:
                self.transport.abort()
            else:
                self.flow.resume_reading()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not valid HTTP with an error in OpenAI's shape, and close the connection.

        uvicorn's own error is plain text. If an answer has begun already, no error is sent.
        """
        if self.cycle:
            self.cycle.disconnected = True  # the route that is answering stops
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            error = cast(StrictConnection, self.conn).error
            assert error is not None  # uvicorn calls this method only after `next_event` has raised
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
        """Whether the server waits for the client to send a request, or the rest of a request."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def _close_longest_waiting(self) -> None:
        """Close the connection that has waited longest for its client, if too many connections are open.

        That is this new connection if all others are being served.
        """
        connections = cast(set[PatientProtocol], self.connections)  # `config` makes no other protocol
        still_open = [connection for connection in connections if not connection.transport.is_closing()]
        if len(still_open) > self.max_connections:
            waiting = [connection for connection in still_open if connection.waits_for_client()]
            min(waiting, key=lambda connection: connection.waiting_since).transport.abort()

    def _wait_for_request(self) -> None:
        """Start the deadline for the client's next request."""
        self.waiting_since = self.loop.time()
        self._deadline = self.loop.call_later(REQUEST_SECONDS, self._close_if_waiting)

    def _close_if_waiting(self) -> None:
        """At the deadline: close the connection, unless the request has come as a whole."""
        if self.waits_for_client():
            self.transport.abort()

    def on_response_complete(self) -> None:
        """Start the deadline for the next request: a client could send the request byte by byte."""
        self._deadline.cancel()
        self._wait_for_request()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Close the connection after STALL_SECONDS: an answer that the client does not read takes memory."""
        super().pause_writing()
        self._stall_timer = self.loop.call_later(STALL_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Cancel the deadline of `pause_writing`: the client reads on."""
        super().resume_writing()
        if self._stall_timer:
            self._stall_timer.cancel()


def _unless_cancelled(record: logging.LogRecord) -> bool:
    """A log filter that drops the tracebacks of requests that the shutdown cancels."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def listen(host: str, port: int) -> list[socket.socket]:
    """Listening sockets for `serve`: one for each address of `host`, all with the same port.

    Port 0 selects a free port. The sockets listen at once: clients can connect and then wait until a server
    accepts them, and no other process can take the port. Raises OSError if the port is in use, or if no
    address of `host` belongs to this machine.
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
                # Skip an address that this machine does not have, such as an IPv6 address without IPv6.
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                no_address = error
            else:
                # asyncio sets TCP_NODELAY only for sockets that asyncio itself has opened. Without the
                # option, the second write of an answer waits 40 ms for the client to acknowledge the first.
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sockets.append(opened.enter_context(listener))
        if not sockets:
            raise no_address
        opened.pop_all()
    return sockets


class Server(uvicorn.Server):
    """uvicorn's server, but after a second Ctrl-C the backend is still stopped in order."""

    failed = False  # whether the server ended because the engine had ended (Part 15)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and log the URL: uvicorn logs the URL only if uvicorn itself has opened the sockets."""
        await super().startup(sockets)
        if sockets:
            host, port = self.config.host, sockets[0].getsockname()[1]
            url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            logging.getLogger("uvicorn.error").info("Uvicorn running on %s (Press CTRL+C to quit)", url)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down as uvicorn does. After a second Ctrl-C, cancel the requests that are still under way, and
        then stop the backend, which uvicorn would skip.
        """
        await super().shutdown(sockets)
        if self.force_exit:
            for task in self.server_state.tasks:
                task.cancel()
            await self.lifespan.shutdown()


def config(app: FastAPI, host: str, port: int, log_level: str = "info") -> uvicorn.Config:
    """uvicorn's configuration for `app`. Port 0 selects a free port."""
    logging.getLogger("uvicorn.error").addFilter(_unless_cancelled)
    protocol = type("Protocol", (PatientProtocol,), {"max_connections": max_connections()})
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level=log_level,
        http=protocol,
        ws="none",  # no route uses WebSockets: a request for an upgrade is ignored
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
    """Serve until Ctrl-C or SIGTERM. Answers under way then have SHUTDOWN_SECONDS to end.

    Ctrl-C and SIGTERM both end the process with exit code 0. A server that cannot start, or that `failed`,
    ends the process with exit code 1. `sockets` are those of `listen`, if the caller took the port before it
    made the app.
    """
    previous_handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    gc.collect()
    gc.freeze()  # the collector need not scan the objects that are loaded now
    # The engine's thread needs the interpreter again after each operation of a step. With Python's default
    # switch interval of 5 ms, a step of 10 ms takes 300 ms while another thread tokenizes a prompt, or while
    # a burst of requests arrives.
    sys.setswitchinterval(SWITCH_SECONDS)
    server = make_server(config(app, host, port, log_level))
    try:
        server.run(sockets)
    except KeyboardInterrupt:  # uvicorn raises SIGINT again after it has stopped
        pass
    finally:
        signal.signal(signal.SIGTERM, previous_handler)
    if not server.started or server.failed:
        sys.exit(1)  # the log says why
