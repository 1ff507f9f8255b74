"""The fixtures of Part 6, and servers in front of an engine that takes on no more than it may."""

import threading
from contextlib import ExitStack, contextmanager

import pytest

from engine.server.admission import Admission
from engine.server.app import create_app
from engine.server.capacity import Capacity, QueueLimits
from engine.server.deadline import add_deadlines
from engine.server.run import config
from engine.server.shutdown import DrainingServer
from tests.part04.serving import DEADLINE, _Failures, wait_until
from tests.part06.conftest import engine, fake_engine, gate, passed, pytest_runtest_makereport  # noqa: F401

SEATS = 1  # of Part 6's engine


@contextmanager
def draining(backend: Admission, shutdown_timeout: float = DEADLINE):
    """(server, its URL): it is stopped as a signal would stop it."""
    app = create_app(backend, extensions=[add_deadlines])
    server = DrainingServer(config(app, "127.0.0.1", 0, log_level="critical"), backend, shutdown_timeout)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive())
        yield server, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        server.force_exit = True  # whatever a failed test has left open
        thread.join(DEADLINE)
        assert not thread.is_alive(), "the server did not stop"


@pytest.fixture
def until():
    """until(condition): as `wait_until`, but a failure of the server is raised here at once."""
    failures = _Failures()
    failures.logger.addHandler(failures)

    def wait(condition) -> None:
        wait_until(lambda: failures.first or condition())
        if failures.first:
            raise failures.first

    yield wait
    failures.logger.removeHandler(failures)


@pytest.fixture
def serving(engine, gate):  # noqa: F811
    """serving(reqs, clock, shutdown_timeout) -> (server, its URL, the Admission), over the fake model, which
    makes as many steps as `gate` allows. In the end nothing may be admitted any more.
    """
    with ExitStack() as stack:
        made = []

        def start(reqs: int = 8, shutdown_timeout: float = DEADLINE, clock=None, **options):
            limits = QueueLimits(reqs, 100_000)
            capacity = Capacity(limits, SEATS, clock) if clock else Capacity(limits, SEATS)
            made.append(Admission(engine, capacity, **options))
            return *stack.enter_context(draining(made[-1], shutdown_timeout)), made[-1]

        yield start
        gate.open()  # a step under way must come back before the engine can stop
    for backend in made:
        assert backend.idle, "places were not given back"
