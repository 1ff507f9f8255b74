"""The end of the server: new requests are refused, and those under way finish, or are told why not. Part 15.

Promises, on SIGTERM as on Ctrl-C: a new request is refused in words, and its connection closed, instead of
finding no server; running answers have `--shutdown-timeout` seconds; one that is not done by then gets what
there is and why; and the process ends with exit code 0.
"""

import asyncio
import logging
import socket

import uvicorn

from engine.server.admission import Admission
from engine.server.run import Server

logger = logging.getLogger("uvicorn.error")  # the server's own
TICK = 0.05  # seconds between two looks whether all are done, or Ctrl-C came again
LAST_WORDS_SECONDS = 3  # for a client to read why its answer ends


class DrainingServer(Server):
    """Part 4's, but it first lets the admitted requests end while it still listens."""

    def __init__(self, config: uvicorn.Config, admission: Admission, shutdown_timeout: float) -> None:
        """`shutdown_timeout`: seconds for answers under way."""
        super().__init__(config)
        config.timeout_graceful_shutdown = LAST_WORDS_SECONDS
        self.admission, self.shutdown_timeout = admission, shutdown_timeout

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let admitted requests end, `shutdown_timeout` seconds at most; tell the others, and stop."""
        logger.info("Shutting down: answers under way have %g seconds", self.shutdown_timeout)
        # 1. New requests are refused; the others go on. A second Ctrl-C (`force_exit`) ends the waiting.
        self.admission.begin_shutdown(self.shutdown_timeout)
        end = asyncio.get_running_loop().time() + self.shutdown_timeout
        while not (self.admission.idle or self.force_exit or asyncio.get_running_loop().time() >= end):
            await asyncio.sleep(TICK)
        # 2. Those that are not done are told; then connections are closed, and the engine is stopped.
        self.admission.end_all()
        await super().shutdown(sockets)
