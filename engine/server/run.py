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
from contextlib import ExitStack
from typing import cast

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

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

BACKLOG = 64  # connections the system holds ready, at most
BATCHES = 3  # of as many that asyncio takes before the first of them can be turned away
FILES_FOR_OTHERS = 64  # of those the system lends this process
FILES_UNTOLD = 512  # where the system does not say how many it lends: what `select` takes on Windows


def files() -> int:
    """How many the system lends this process, connections among them."""
    if resource is None:
        return FILES_UNTOLD
    lent = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if lent == resource.RLIM_INFINITY else lent  # a negative number on Linux


def backlog() -> int:
    """Fewer where files are few: connections taken before one is turned away need files, too."""
    return max(1, min(BACKLOG, files() // 16))


def max_connections() -> int:
    """How many may be open at once: MAX_CONNECTIONS, or as many as the system lends us files for."""
    return max(1, min(MAX_CONNECTIONS, files() - BATCHES * backlog() - FILES_FOR_OTHERS))


class ChunkLimit(h11.Connection):
    """h11's, but a body may have MAX_CHUNKS chunks."""

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Against bodies in crumbs: a megabyte in chunks of a byte keeps all others waiting for seconds."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = 0
        elif isinstance(event, h11.Data) and event.chunk_start:
            self._chunks += 1
            if self._chunks > MAX_CHUNKS:
                raise h11.RemoteProtocolError(f"a body has more than {MAX_CHUNKS} chunks")
        return event


class PatientProtocol(H11Protocol):
    """uvicorn's protocol, patient up to a point. uvicorn itself closes one that idles after an answer."""

    max_connections: int

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Against clients that connect and say nothing: each has a deadline, and all have a number."""
        self.conn = ChunkLimit(h11.SERVER)
        super().connection_made(transport)
        self._stalled: asyncio.TimerHandle | None = None
        self._wait_for_request()
        if len(self.connections) > self.max_connections:
            self._close_longest_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        """The deadlines of a connection end with it."""
        super().connection_lost(exc)
        self._deadline.cancel()
        if self._stalled:
            self._stalled.cancel()

    def data_received(self, data: bytes) -> None:
        """Against clients that leave unnoticed, and against floods. While a request is being answered, what
        comes is of the next one. uvicorn then stops reading, and would not notice that the client has left:
        here it reads on, up to MAX_BYTES_AHEAD.
        """
        super().data_received(data)
        if self.conn.their_state is h11.DONE:
            if len(self.conn.trailing_data[0]) > MAX_BYTES_AHEAD:
                self.transport.abort()
            else:
                self.flow.resume_reading()

    def send_400_response(self, msg: str) -> None:
        """Against nonsense behind a request: it ends the connection, and is not answered a second time."""
        if self.cycle:
            self.cycle.disconnected = True  # the route that is at its answer need not send it
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def waits_for_client(self) -> bool:
        """Whether it is the client's turn: no request has arrived in full."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def _close_longest_waiting(self) -> None:
        """The one that has kept us waiting longest goes: this one, if all others are being served."""
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
        """Against clients that send their next request byte by byte: it has a deadline, too."""
        self._deadline.cancel()
        self._wait_for_request()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Against clients that do not read their answer: it is held in memory as long as they like."""
        super().pause_writing()
        self._stalled = self.loop.call_later(STALL_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads on in time: the deadline of `pause_writing` is off."""
        super().resume_writing()
        if self._stalled:
            self._stalled.cancel()


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
    absent = OSError(errno.EADDRNOTAVAIL, "no address of this machine")
    with ExitStack() as opened:
        for family, _, _, _, (name, _, *scope) in dict.fromkeys(addresses):
            if sockets:
                port = sockets[0].getsockname()[1]
            try:
                made = socket.create_server((name, port, *scope), family=family, backlog=backlog())
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):  # no IPv6, it may be
                    raise
                absent = error
            else:
                sockets.append(opened.enter_context(made))
        if not sockets:
            raise absent
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
        """Against clients that hold up the end: after a second Ctrl-C their requests are cancelled."""
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
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    gc.collect()
    gc.freeze()  # what was loaded stays: the collector need not look at it again while a body is read
    # The engine's thread asks for the interpreter after each of a step's operations. At Python's own 5 ms a
    # time, a prompt being tokenized, or a burst of requests, makes a step of 10 ms one of 300.
    sys.setswitchinterval(SWITCH_SECONDS)
    server = make_server(config(app, host, port, log_level))
    try:
        server.run(sockets)
    except KeyboardInterrupt:  # uvicorn has stopped, and passes the signal on; so it does with SIGTERM
        pass
    finally:
        signal.signal(signal.SIGTERM, before)
    if not server.started:
        sys.exit(1)  # it has said why
