"""A client's connection, with a deadline for everything that the client has to do. Part 4.

Promises that a client that sends slowly, reads slowly or does nothing is cut off; that such clients, and
bodies in many small chunks, do not keep other clients out; and that a client that leaves is noticed. The
deadlines and limits are in `limits`.

A client that closes only the sending half of its connection counts as a client that has left: until the
server writes to the connection, the server cannot tell the two apart.
"""

import asyncio
import socket
from contextlib import suppress
from http import HTTPStatus
from typing import cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from engine.server.errors import RequestError
from engine.server.limits import MAX_BYTES_AHEAD, MAX_CHUNKS, REQUEST_SECONDS, STALL_SECONDS


class StrictConnection(h11.Connection):
    """h11's connection, which also refuses a body with two lengths or more than MAX_CHUNKS chunks.

    `error` keeps the error, which uvicorn does not pass on, for `PatientProtocol.send_400_response`.
    """

    error: h11.RemoteProtocolError | None = None  # why the request could not be read
    num_chunks = 0  # of the body that is being read

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
            self.num_chunks = 0
            if {b"content-length", b"transfer-encoding"} <= {name for name, _ in event.headers}:
                raise h11.RemoteProtocolError("Content-Length and Transfer-Encoding say two lengths")
        elif isinstance(event, h11.Data) and event.chunk_start:
            self.num_chunks += 1
            if self.num_chunks > MAX_CHUNKS:
                raise h11.RemoteProtocolError(f"a body has more than {MAX_CHUNKS} chunks")


class PatientProtocol(H11Protocol):
    """uvicorn's protocol for one connection, with a deadline for everything that the client has to do.

    uvicorn itself closes a connection that is idle after an answer.
    """

    max_connections: int  # a subclass sets it: uvicorn makes the protocols itself

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Start the deadline for the first request, and close a connection if there are too many."""
        self.conn = StrictConnection(h11.SERVER)
        super().connection_made(transport)
        self._stall_timer: asyncio.TimerHandle | None = None
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # on Linux
            # Cuts off a client that has vanished, or that takes nothing of what the system buffers for it. An
            # answer of little text needs minutes to fill that buffer, so `pause_writing` would come too late.
            milliseconds = int(1000 * STALL_SECONDS)
            connection = transport.get_extra_info("socket")
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
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
        """Read on while a request is being answered. Close the connection if the client sends more than
        MAX_BYTES_AHEAD bytes of the next request meanwhile.

        uvicorn itself would stop reading, and would not notice that the client has left.
        """
        super().data_received(data)
        if self.conn.their_state is h11.DONE:
            next_request, _ = self.conn.trailing_data  # as far as it has come
            if len(next_request) > MAX_BYTES_AHEAD:
                self.transport.abort()
            else:
                self.flow.resume_reading()

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

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not valid HTTP with an error in OpenAI's shape, and close the connection.

        uvicorn's own error is plain text. If an answer has begun already, no error is sent.
        """
        if self.cycle:  # uvicorn's state of one request and its answer
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
            longest = min(waiting, key=lambda connection: connection.waiting_since)
            longest.transport.abort()

    def _wait_for_request(self) -> None:
        """Start the deadline for the client's next request."""
        self.waiting_since = self.loop.time()
        self._deadline = self.loop.call_later(REQUEST_SECONDS, self._close_if_waiting)

    def _close_if_waiting(self) -> None:
        """At the deadline: close the connection, unless the request has come as a whole."""
        if self.waits_for_client():
            self.transport.abort()
