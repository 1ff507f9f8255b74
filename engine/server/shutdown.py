"""Graceful shutdown: new requests are refused, and requests under way may finish. Part 15.

Promises, on SIGTERM and on Ctrl-C: a new request gets a 503, and its connection is closed. Running answers
have `--shutdown-timeout` seconds. An answer that is not finished by then ends with the tokens it has and the
finish reason "abort", or with an error if it has no token. The process ends with exit code 0.

If the engine ends by itself, every reader gets an error, and the process ends at once with exit code 1, so
that a supervisor can start the process again.
"""

import asyncio
import logging
import socket

import uvicorn

from engine.server.admission import Admission
from engine.server.run import Server

logger = logging.getLogger("uvicorn.error")  # uvicorn's logger, which writes the server's log
POLL_SECONDS = 0.05  # between two checks whether the wait is over
LAST_EVENT_SECONDS = 3  # for a client to read the last event of its answer


class DrainingServer(Server):
    """Part 4's server, which on shutdown first waits for the admitted requests while it still listens."""

    def __init__(self, config: uvicorn.Config, admission: Admission, shutdown_timeout: float) -> None:
        """`shutdown_timeout`: how many seconds the answers under way have to finish. uvicorn's own wait after
        that, `config.timeout_graceful_shutdown`, becomes LAST_EVENT_SECONDS.
        """
        super().__init__(config)
        config.timeout_graceful_shutdown = LAST_EVENT_SECONDS
        self.admission, self.shutdown_timeout = admission, shutdown_timeout

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; True ends the server."""
        if not self.admission.backend.health():
            logger.critical("The engine has ended: this server ends, too")
            self.failed = True
        return self.failed or await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait `shutdown_timeout` seconds at most for the admitted requests, end the rest, and stop."""
        message = "Shutting down: answers under way have %g seconds; a second Ctrl-C ends them now"
        logger.info(message, self.shutdown_timeout)
        # 1. Refuse new requests, and wait for admitted ones. A second Ctrl-C (`force_exit`) ends the wait.
        self.admission.begin_shutdown(self.shutdown_timeout)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.shutdown_timeout
        while not self.admission.idle and not self.force_exit and loop.time() < deadline:
            await asyncio.sleep(POLL_SECONDS)
        # 2. End the requests that are left. Then close the connections, and stop the engine.
        self.admission.end_all()
        await super().shutdown(sockets)
