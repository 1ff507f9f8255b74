"""The end of the server: new requests are refused, and those under way finish, or are told why not. Part 15.

Promises, on SIGTERM as on Ctrl-C: a new request gets a refusal and its connection is closed, instead of
finding no server; running answers have `--shutdown-timeout` seconds; one that is not done by then ends with
the tokens it has and the reason; and the process ends with exit code 0.
"""

import asyncio
import logging
import socket

import uvicorn

from engine.server.admission import Admission
from engine.server.run import Server

logger = logging.getLogger("uvicorn.error")  # the server's own
POLL_SECONDS = 0.05  # between two checks whether all requests are done, or Ctrl-C came again
LAST_EVENT_SECONDS = 3  # for a client to read why its answer ends


class DrainingServer(Server):
    """Part 4's server, which first lets the admitted requests end while it still listens."""

    def __init__(self, config: uvicorn.Config, admission: Admission, shutdown_timeout: float) -> None:
        """`shutdown_timeout`: seconds for answers under way."""
        super().__init__(config)
        config.timeout_graceful_shutdown = LAST_EVENT_SECONDS
        self.admission, self.shutdown_timeout = admission, shutdown_timeout

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let admitted requests end for `shutdown_timeout` seconds at most, end the others, and stop."""
        logger.info("Shutting down: answers under way have %g seconds", self.shutdown_timeout)
        # 1. New requests are refused; the others go on. A second Ctrl-C (`force_exit`) ends the waiting.
        self.admission.begin_shutdown(self.shutdown_timeout)
        deadline = asyncio.get_running_loop().time() + self.shutdown_timeout
        while not (self.admission.idle or self.force_exit or asyncio.get_running_loop().time() >= deadline):
            await asyncio.sleep(POLL_SECONDS)
        # 2. The others end with the reason; then connections are closed, and the engine is stopped.
        self.admission.end_all()
        await super().shutdown(sockets)
