"""Clients that are slow or leave things half done, and the end of the server: each has its deadline."""

import asyncio
import errno
import json
import logging
import os
import socket
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace

import httpx
import pytest
from fastapi.responses import StreamingResponse

import engine.server.run as run
from engine.server import connections as connections_module
from engine.server.app import create_app
from tests.part04.serving import DEADLINE, ScriptedBackend, http, serve, wait_until

ASK = {"model": "script", "prompt": "go"}
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
)
FLOOD = b"GET /flood/1000000 HTTP/1.1\r\nhost: x\r\n\r\n"
SHORT = 0.4  # seconds instead of the server's own, where it is late that somebody is to be


@pytest.fixture
def connections(monkeypatch):
    """The server's side of each connection, in order of arrival."""
    made, connection_made = [], connections_module.PatientProtocol.connection_made

    def noted(protocol, transport):
        connection_made(protocol, transport)
        made.append(protocol)

    monkeypatch.setattr(connections_module.PatientProtocol, "connection_made", noted)
    return made


def in_its_loop(protocol, *functions) -> None:
    """Called one after the other, with nothing in between."""
    over = threading.Event()

    def call() -> None:
        for function in functions:
            function()
        over.set()

    protocol.loop.call_soon_threadsafe(call)
    assert over.wait(DEADLINE)


def connect(url: str, *settings: tuple[int, int]) -> socket.socket:
    connection = socket.socket()
    for name, value in settings:
        connection.setsockopt(socket.SOL_SOCKET, name, value)
    connection.settimeout(DEADLINE)
    connection.connect(("127.0.0.1", int(url.rpartition(":")[2])))
    return connection


def is_closed(connection: socket.socket) -> bool:
    """Waits until the server has closed it, without a word or after one."""
    try:
        while connection.recv(2**16):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


@contextmanager
def serving(monkeypatch, backend=None, **settings):
    """URL and client of a server with deadlines of its own."""
    for name, value in settings.items():
        monkeypatch.setattr(connections_module, name, value)
    backend = backend or ScriptedBackend()
    with serve(create_app(backend, extensions=[flood]), patience=1) as url, http(url) as client:
        yield url, client
    assert backend.open == 0, "an answer that was cut off still holds what it was made from"


def flood(app, backend) -> None:
    """A route whose answer has no end, as large or small pieces as asked for."""

    @app.get("/flood/{size}")
    async def flood(size: int) -> StreamingResponse:
        async def pieces():
            backend.open += 1
            backend.life.append("flooding")
            try:
                while True:
                    yield "x" * size
                    await asyncio.sleep(0.001)
            finally:
                backend.open -= 1

        return StreamingResponse(pieces())


@pytest.mark.parametrize(
    "sent",
    [b"", b"POST /v1/comp", b"POST / HTTP/1.1\r\nhost: x\r\n", HEAD % 100, HEAD % 100 + b'{"model": "scr'],
    ids=["nothing", "half a line", "half a head", "no body", "half a body"],
)
def test_who_does_not_send_a_request_in_time_is_cut_off(monkeypatch, sent):
    with serving(monkeypatch, REQUEST_SECONDS=SHORT) as (url, client), connect(url) as connection:
        connection.sendall(sent)
        assert is_closed(connection), "the connection is still open"
        monkeypatch.undo()  # this client may take its time
        assert client.get("/health").status_code == 200


def test_who_sends_byte_by_byte_has_no_more_time_than_others(monkeypatch):
    body = json.dumps(ASK | {"prompt": "go" * 500}).encode()  # 20 seconds of bytes
    with serving(monkeypatch, REQUEST_SECONDS=SHORT) as (url, _), connect(url) as connection:
        sent = 0
        with suppress(ConnectionResetError, BrokenPipeError):
            for byte in HEAD % len(body) + body:
                connection.sendall(bytes([byte]))
                sent += 1
                time.sleep(0.02)
        assert sent < len(HEAD + body), "each byte has bought more time"


def test_a_connection_that_is_kept_alive_has_the_time_anew_for_each_request(monkeypatch, connections):
    with serving(monkeypatch, REQUEST_SECONDS=DEADLINE) as (url, _), connect(url) as connection:
        wait_until(lambda: connections)
        deadlines = [connections[0]._deadline]
        for seconds in (DEADLINE, DEADLINE, SHORT):  # until the next request must be there
            monkeypatch.setattr(connections_module, "REQUEST_SECONDS", seconds)
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            answer = b""
            while b'"ok"' not in answer:
                answer += (piece := connection.recv(2**16))
                assert piece, "the connection was closed between two requests"
            wait_until(lambda: connections[0]._deadline is not deadlines[-1])
            deadlines.append(connections[0]._deadline)
        held = [deadline.cancelled() for deadline in deadlines[:3]]
        assert held == [True] * 3, "the deadline of a request that has come still holds"
        connection.sendall(b"G")  # begun, and never ended
        assert is_closed(connection), "the time for the last request has no end"


def test_an_answer_that_takes_longer_than_a_request_may_is_not_cut_off(monkeypatch, connections):
    with serving(monkeypatch) as (_, client), client.stream("GET", "/flood/1") as answer:
        pieces = answer.iter_bytes()
        next(pieces)
        in_its_loop(connections[0], connections[0]._close_if_waiting)  # as if its time were over now
        more = 0
        with suppress(httpx.TransportError):
            while more < 100:
                next(pieces)
                more += 1
        assert more == 100, "the stream was cut off"


def test_who_does_not_read_is_cut_off_and_what_it_had_is_given_back(monkeypatch):
    backend = ScriptedBackend()
    with (
        serving(monkeypatch, backend, STALL_SECONDS=SHORT) as (url, _),
        connect(url, (socket.SO_RCVBUF, 4096)) as connection,
    ):
        connection.sendall(FLOOD)
        wait_until(lambda: "flooding" in backend.life)
        wait_until(lambda: backend.open == 0)


def test_who_reads_on_in_time_is_not_cut_off(monkeypatch, connections):
    with serving(monkeypatch) as (url, _), connect(url):
        wait_until(lambda: connections)
        in_its_loop(connections[0], connections[0].pause_writing, connections[0].resume_writing)
        assert connections[0]._stall_timer.cancelled(), "it has read on, and its deadline still holds"


def test_who_makes_room():
    gone = []

    def one(since: float, waits: bool = True, closing: bool = False) -> SimpleNamespace:
        transport = SimpleNamespace(is_closing=lambda: closing, abort=lambda: gone.append(since))
        return SimpleNamespace(waiting_since=since, waits_for_client=lambda: waits, transport=transport)

    def make_room(*connections) -> list[float]:
        gone.clear()
        connections_module.PatientProtocol._close_longest_waiting(
            SimpleNamespace(connections=connections, max_connections=2)
        )
        return gone

    assert make_room(one(3), one(1), one(2)) == [1], "the one that has kept us waiting longest goes"
    assert make_room(one(3), one(1, waits=False), one(2)) == [2], "one that is being served stays"
    assert make_room(one(3), one(1, closing=True), one(2)) == [], "one that is closing has made room already"


def test_a_new_client_is_let_in_however_many_say_nothing(monkeypatch):
    monkeypatch.setattr(run, "max_connections", lambda: 10)
    with serving(monkeypatch) as (url, client), ExitStack() as stack:
        silent = [stack.enter_context(connect(url)) for _ in range(30)]
        assert client.get("/health").status_code == 200
        gone = [is_closed(connection) for connection in silent[:15]]
        assert gone == [True] * 15, "the ones that have been silent longest make room"


def test_one_connection_too_many_closes_one_only_the_one_that_has_said_nothing_longest(
    monkeypatch, connections
):
    monkeypatch.setattr(run, "max_connections", lambda: 3)
    with serving(monkeypatch, REQUEST_SECONDS=10 * DEADLINE) as (url, _), ExitStack() as stack:
        silent = []
        for count in range(1, 5):
            silent.append(stack.enter_context(connect(url)))
            wait_until(lambda count=count: len(connections) == count)
        assert is_closed(silent[0]), "three may be open, and four are"
        for connection in silent[1:]:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b"200 OK" in connection.recv(2**16), "one of the three was closed"


def test_as_many_connections_as_the_system_has_files_for(monkeypatch):
    lent = SimpleNamespace(RLIMIT_NOFILE=7, RLIM_INFINITY=-1)
    monkeypatch.setattr(run, "resource", lent)
    for files, backlog, connections in (
        (8, 1, 1),
        (16, 1, 1),
        (64, 4, 1),
        (256, 16, 256 - 3 * 16 - run.OTHER_FILES),
        (1024, 64, 1024 - 3 * 64 - run.OTHER_FILES),
        (2**20, 64, run.MAX_CONNECTIONS),
        (-1, 64, run.MAX_CONNECTIONS),
    ):
        lent.getrlimit = lambda kind, files=files: (files, files)
        assert run.max_connections() == connections, f"the system lends {files} files"
        assert run.backlog() == backlog, f"the system lends {files} files, of which three backlogs take some"
    monkeypatch.setattr(run, "resource", None)
    assert run.max_connections() == run.WINDOWS_FILES - 3 * 32 - run.OTHER_FILES, "Windows does not say"


@pytest.mark.parametrize("sent", [HEAD % 100 + b"{", FLOOD], ids=["half a body", "never reads"])
def test_the_server_stops_whatever_its_clients_do(monkeypatch, sent):
    """`serve` waits for the server's end, and fails without it."""
    with ExitStack() as stack, serving(monkeypatch) as (url, _):
        connection = stack.enter_context(connect(url, (socket.SO_RCVBUF, 4096)))
        connection.sendall(sent)
        time.sleep(SHORT)


def test_a_server_whose_backend_does_not_start_ends_with_an_error(monkeypatch):
    class Broken(ScriptedBackend):
        async def __aenter__(self):
            raise RuntimeError("no memory")

    for_a_process_of_its_own = []
    monkeypatch.setattr(run.gc, "freeze", lambda: None)
    monkeypatch.setattr(run.sys, "setswitchinterval", for_a_process_of_its_own.append)
    with pytest.raises(SystemExit) as ended:
        run.serve(create_app(Broken()), "127.0.0.1", 0, log_level="critical")
    assert ended.value.code, "who started it learns from the exit code that it does not run"
    assert [seconds < 0.001 for seconds in for_a_process_of_its_own] == [True], (
        "at Python's 5 ms a time, a thread that computes in Python makes others' steps wait"
    )


def test_an_answer_in_two_writes_does_not_wait_until_the_first_is_acknowledged():
    (listener,) = run.listen("127.0.0.1", 0)
    with listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY), "40 ms for each answer"


def test_a_client_that_comes_before_the_server_is_answered_once_it_has_started(capsys):
    """The port is taken before anything is loaded: who connects meanwhile waits, and is not turned away."""
    sockets = run.listen("127.0.0.1", 0)
    port = sockets[0].getsockname()[1]
    with pytest.raises(OSError, match="in use"):
        run.listen("127.0.0.1", port)
    with socket.create_connection(("127.0.0.1", port), DEADLINE) as early:
        early.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        server = run.Server(run.config(create_app(ScriptedBackend()), "127.0.0.1", 0))
        thread = threading.Thread(target=server.run, args=(sockets,))
        thread.start()
        answer = b"".join(iter(lambda: early.recv(2**16), b""))
        server.should_exit = True
        thread.join(DEADLINE)
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert f"Uvicorn running on http://127.0.0.1:{port} " in capsys.readouterr().err, (
        "who started it learns which port"
    )
    assert [made.fileno() for made in sockets] == [-1], "closed with the server"


def test_a_name_with_several_addresses_is_served_on_each(monkeypatch):
    """As asyncio does it: what is not there (no IPv6, say) is left out while another is there."""
    kind = socket.SOCK_STREAM, 6, ""
    local, absent = (socket.AF_INET, *kind, ("127.0.0.1", 0)), (socket.AF_INET, *kind, ("192.0.2.1", 0))
    also = socket.AF_INET, *kind, ("127.0.0.2", 0)
    monkeypatch.setattr(run.socket, "getaddrinfo", lambda *_, **__: [absent, local, also, local])
    sockets = run.listen("name", 0)
    names = [made.getsockname() for made in sockets]
    for made in sockets:
        made.close()
    assert names == [("127.0.0.1", names[0][1]), ("127.0.0.2", names[0][1])]
    monkeypatch.setattr(run.socket, "getaddrinfo", lambda *_, **__: [absent])
    with pytest.raises(OSError, match=r"192\.0\.2\.1") as caught:
        run.listen("name", 0)
    assert caught.value.errno == errno.EADDRNOTAVAIL


def test_a_kind_of_address_that_the_machine_does_not_have_is_left_out(monkeypatch):
    """A kernel without IPv6 knows no such socket. Any other error is raised: half a name is not served."""
    kind, create = (socket.SOCK_STREAM, 6, ""), socket.create_server
    of_six, of_four = (socket.AF_INET6, *kind, ("::1", 0, 0, 0)), (socket.AF_INET, *kind, ("127.0.0.1", 0))
    fails_with = errno.EAFNOSUPPORT

    def without_six(address, *, family, **options):
        if family == socket.AF_INET6:
            raise OSError(fails_with, os.strerror(fails_with))
        return create(address, family=family, **options)

    monkeypatch.setattr(run.socket, "getaddrinfo", lambda *_, **__: [of_six, of_four])
    monkeypatch.setattr(run.socket, "create_server", without_six)
    (listener,) = run.listen("name", 0)
    with listener:
        assert listener.family == socket.AF_INET, "what the machine has is served"
    fails_with = errno.EACCES
    with pytest.raises(PermissionError):
        run.listen("name", 0)
    fails_with = errno.EAFNOSUPPORT
    monkeypatch.setattr(run.socket, "getaddrinfo", lambda *_, **__: [of_six])
    with pytest.raises(OSError, match=os.strerror(errno.EAFNOSUPPORT)):
        run.listen("name", 0)


@pytest.mark.parametrize("interrupts", [1, 2])
def test_a_second_interrupt_cuts_off_clients_and_the_backend_is_still_stopped(monkeypatch, interrupts):
    """uvicorn itself stops the backend (its lifespan) after the first interrupt alone."""
    done = []

    async def uvicorns_own(self, sockets=None):
        done.append("uvicorn")

    async def stop_backend():
        done.append("backend")

    async def shut_down() -> bool:
        server = run.Server(run.config(create_app(ScriptedBackend()), "127.0.0.1", 0))
        server.force_exit = interrupts == 2
        server.lifespan = SimpleNamespace(shutdown=stop_backend)
        answer = asyncio.create_task(asyncio.Event().wait())
        server.server_state.tasks.add(answer)
        await server.shutdown()
        return answer.cancelling() > 0

    monkeypatch.setattr(run.uvicorn.Server, "shutdown", uvicorns_own)
    assert asyncio.run(shut_down()) == (interrupts == 2), "an answer under way is cut off by the second alone"
    assert done == ["uvicorn", "backend"][:interrupts]


def test_an_answer_that_the_shutdown_cuts_off_has_no_traceback_in_the_log():
    run.config(create_app(ScriptedBackend()), "127.0.0.1", 0)
    (kept,) = {one for one in logging.getLogger("uvicorn.error").filters if one is run._keep_record}
    for error, logged in ((asyncio.CancelledError(), False), (ValueError(), True)):
        record = logging.LogRecord("x", logging.ERROR, "x", 1, "x", (), (type(error), error, None))
        assert kept(record) == logged, f"{type(error).__name__}: logged is {not logged}"


@pytest.mark.parametrize(
    ("started", "failed", "codes"), [(True, False, []), (False, False, [1]), (True, True, [1])]
)
def test_the_exit_code_is_1_for_a_server_that_did_not_start_or_that_failed(
    monkeypatch, started, failed, codes
):
    monkeypatch.setattr(run.gc, "freeze", lambda: None)
    monkeypatch.setattr(run.sys, "setswitchinterval", lambda seconds: None)
    exits: list[int] = []
    monkeypatch.setattr(run.sys, "exit", exits.append)
    ended = SimpleNamespace(run=lambda sockets: None, started=started, failed=failed)
    run.serve(create_app(ScriptedBackend()), "127.0.0.1", 0, make_server=lambda config: ended)
    assert exits == codes
