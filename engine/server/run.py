"""The server's process: uvicorn, which serves an app until Ctrl-C or SIGTERM. Part 4.

Promises that Ctrl-C or SIGTERM ends the process, whatever clients do. What a client may take its time over is
in connections.py.
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
from typing import Any

import uvicorn
from fastapi import FastAPI

from engine.server.connections import PatientProtocol
from engine.server.limits import MAX_CONNECTIONS, SHUTDOWN_SECONDS, SWITCH_SECONDS

if sys.platform == "win32":
    resource = None
else:
    import resource

MAX_BACKLOG = 64  # connections that the system has accepted and asyncio has not yet accepted
BACKLOGS_ACCEPTED = 3  # full backlogs that asyncio may accept before a connection above the limit is closed
OTHER_FILES = 64  # files that this process may open beside its connections
WINDOWS_FILES = 512  # files that `select` accepts on Windows, which states no limit for a process
# Errors for an address that this machine does not have, such as an IPv6 address without IPv6.
NO_ADDRESS_ERRORS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def max_open_files() -> int:
    """How many files this process may have open. Each connection is a file."""
    if resource is None:  # on Windows
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


def listen(host: str, port: int) -> list[socket.socket]:
    """Listening sockets for `serve`: one for each address of `host`, all with the same port.

    Port 0 selects a free port. The sockets listen at once: clients can connect and then wait until a server
    accepts them, and no other process can take the port. Raises OSError if the system refuses the port (it is
    in use, for example), or if no address of `host` belongs to this machine.
    """
    infos = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    no_address = OSError(errno.EADDRNOTAVAIL, "no address of this machine")
    with ExitStack() as opened:  # closes the sockets if one of them cannot be opened
        for family, _, _, _, address in dict.fromkeys(infos):  # each address once
            if sockets:  # a port that was selected for the first address is the port of all
                port = sockets[0].getsockname()[1]
            try:
                listener = _listener(family, address, port)
            except OSError as error:
                if error.errno not in NO_ADDRESS_ERRORS:
                    raise
                no_address = error
            else:
                sockets.append(opened.enter_context(listener))
        if not sockets:
            raise no_address
        opened.pop_all()  # keeps the sockets open
    return sockets


def _listener(family: int, address: tuple[Any, ...], port: int) -> socket.socket:
    """A listening socket. `address` is one of getaddrinfo's; `port` replaces the port in it."""
    host = address[0]
    ipv6_fields = address[2:]  # (flow, scope); () for IPv4
    listener = socket.create_server((host, port, *ipv6_fields), family=family, backlog=backlog())
    # asyncio sets TCP_NODELAY only for sockets that asyncio itself has opened. Without the option, the second
    # write of an answer waits 40 ms for the client to acknowledge the first.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


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
    """uvicorn's configuration for `app`. Port 0 selects a free port. Adds a filter to uvicorn's log."""
    logging.getLogger("uvicorn.error").addFilter(_keep_record)
    limit = max_connections()

    class LimitedProtocol(PatientProtocol):
        max_connections = limit

    return uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level=log_level,
        http=LimitedProtocol,
        ws="none",  # no route uses WebSockets: a request for an upgrade is ignored
        backlog=backlog(),
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )


def _keep_record(record: logging.LogRecord) -> bool:
    """A filter of log records: False for the traceback of a request that the shutdown has cancelled."""
    if not record.exc_info:
        return True
    _, error, _ = record.exc_info
    return not isinstance(error, asyncio.CancelledError)


def serve(
    app: FastAPI,
    host: str,
    port: int,
    log_level: str = "info",
    make_server: Callable[[uvicorn.Config], Server] = Server,
    sockets: list[socket.socket] | None = None,
) -> None:
    """Serve until Ctrl-C or SIGTERM. Answers under way then have SHUTDOWN_SECONDS to end.

    Returns after Ctrl-C. Raises SystemExit after SIGTERM (code 0), and if the server cannot start or has
    `failed` (code 1). `make_server` makes the server from uvicorn's configuration. `sockets` are those of
    `listen`, if the caller took the port before it made the app.
    """
    # uvicorn raises SIGTERM again after it has stopped. By default, that would kill the process before the
    # caller has closed the engine.
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
