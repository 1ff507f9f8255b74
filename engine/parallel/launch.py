"""Starts, watches and ends the processes of ranks 1, 2, …, and sends them orders. Extension A.

No such process outlives rank 0's process, however rank 0 ends. If a rank ends by itself, in a step or between
two steps, rank 0 notices.
"""

import atexit
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import engine
from engine.parallel.orders import STOP, write_order
from engine.requests.request import error_text

WORKER = "engine.wiring.rank"  # the module that a rank's process runs
READY = b"ready\n"  # a rank's process writes this line when it is about to join the group
CAUSE_SECONDS = 1  # after a failure on rank 0, how long to wait for the news that another rank has ended
STOP_SECONDS = 10  # how long a rank may take to end after the order to stop, before it is killed


class RankLost(BaseException):
    """A rank has ended, does not answer, or is out of step with the others, so no rank can go on.

    RankLost is no `Exception`, so no `except Exception` takes it for the error of one request. It ends the
    engine's thread, and every reader gets an error.
    """


@dataclass(frozen=True)
class Worker:
    """A rank's process."""

    rank: int
    process: subprocess.Popen
    orders: IO[bytes]  # writes to the process's standard input
    output: IO[bytes]  # reads the process's standard output; only until the process is ready


class Workers:
    """Ranks 1 to size - 1, each in a process of this machine. Any thread may call `on_lost` and `stop`; the
    other methods are for the engine's thread.
    """

    def __init__(self, size: int, options: Callable[[int], Mapping[str, Any]]) -> None:
        """Start the processes. `options(rank)` returns one process's options, which are sent as JSON.

        Raises OSError if a process cannot be started. Then none is left.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="ruvon-")  # mode 0700: no other user may read it
        self.store = os.path.join(self._folder.name, "ranks")  # through this file, ranks find each other
        self._lost_reason: str | None = None  # why no step can be computed any more; None while steps can
        self._on_lost: list[Callable[[RankLost], None]] = []
        self._on_stop: list[Callable[[], None]] = []
        self._is_stopping = False  # whether `stop` was called
        self._lock = threading.Lock()  # for `_lost_reason`, `_on_lost` and `_is_stopping`
        self._is_lost = threading.Event()  # set right after `_lost_reason`
        self._order_lock = threading.Lock()  # held while one order is sent to all ranks
        self._process_id = os.getpid()
        # When this process ends in any way, the system closes its end of this pipe. The other processes see
        # that, and end, too.
        read_end, self._lifeline = _pipe()
        self.workers: list[Worker] = []
        atexit.register(self.stop)
        try:
            for rank in range(1, size):
                self.workers.append(_start(rank, read_end))
        except BaseException as error:
            self._mark_lost(f"a process cannot be started: {error_text(error)}")
            self.stop()
            raise
        finally:
            os.close(read_end)
        for worker in self.workers:
            common = {"rank": worker.rank, "size": size, "store": self.store}
            _send_options(worker, common | dict(options(worker.rank)))
            threading.Thread(target=self._watch, args=(worker,), daemon=True).start()

    def wait_until_ready(self) -> None:
        """Wait until all processes are about to join the group. Raises RankLost if a process has ended: its
        standard error says why.
        """
        for worker in self.workers:
            line = worker.output.readline()
            while line and line != READY:  # skip what a library prints before
                line = worker.output.readline()
            if not line:  # the end of the output
                how = _exit_text(worker.process.wait())
                raise RankLost(f"rank {worker.rank} has ended at its start: {how}")

    def send_order(self, kind: int, payload: bytes = b"") -> None:
        """Send an order to all ranks. `kind` is one of orders.py's. Raises RankLost."""
        with self.raising_rank_lost(), self._order_lock:
            for worker in self.workers:
                write_order(worker.orders, kind, payload)

    @contextmanager
    def raising_rank_lost(self) -> Iterator[None]:
        """A context for work that all ranks do. Raises RankLost for any Exception inside, and at the start if
        a rank is lost already.
        """
        if os.getpid() != self._process_id:  # the ranks would wait for the sums of two processes
            raise RankLost("this process was forked from the one that made the engine, whose ranks these are")
        if self._lost_reason:
            raise RankLost(self._lost_reason)
        try:
            yield
        except Exception as error:
            # If another rank has ended, its end is the cause of this error, and is reported in its place.
            self._is_lost.wait(CAUSE_SECONDS)
            raise self._mark_lost(f"rank 0 cannot go on: {error_text(error)}") from error

    def wait_for(self, is_done: Callable[[], bool], seconds: float) -> None:
        """Wait until `is_done()`. Raises RuntimeError if a rank is lost meanwhile, or after `seconds`."""
        end = time.monotonic() + seconds
        while not is_done():
            if self._lost_reason:
                raise RuntimeError(self._lost_reason)
            if time.monotonic() > end:
                raise RuntimeError(f"a step has not ended in {seconds} s: a rank does not answer")
            time.sleep(0)  # other threads may run

    def on_lost(self, callback: Callable[[RankLost], None]) -> None:
        """Have `callback` called, in any thread, when a rank is lost: now, if a rank is lost already or
        `stop` has ended the ranks. A stop itself calls nobody.
        """
        with self._lock:
            self._on_lost.append(callback)
            reason = self._lost_reason
        if reason:
            callback(RankLost(reason))

    def on_stop(self, callback: Callable[[], None]) -> None:
        """Have `callback` called at the end of `stop`."""
        self._on_stop.append(callback)

    def stop(self) -> None:
        """End all processes (`_end_processes`), and then call the callbacks of `on_stop`. A second call does
        nothing, and so does a call in a forked process, whose exit leaves the ranks alone.
        """
        if os.getpid() != self._process_id:
            return
        atexit.unregister(self.stop)
        with self._lock:
            was_stopping = self._is_stopping
            self._is_stopping = True
        if was_stopping:
            return
        self._end_processes()
        os.close(self._lifeline)
        with self._lock:
            if self._lost_reason is None:
                self._lost_reason = "the engine has been shut down"
        self._is_lost.set()
        self._folder.cleanup()
        for callback in self._on_stop:
            callback()

    def _end_processes(self) -> None:
        """Send the order to stop, wait up to STOP_SECONDS for each process, and kill a process that is left.
        Kill all processes at once if a rank is lost. If another thread is sending an order that some rank
        does not read, kill all after STOP_SECONDS.
        """
        # An order that another thread is sending goes to all ranks first: a rank that had it alone would wait
        # for the others' sums. If a rank does not read the order, the lock stays held.
        has_lock = self._order_lock.acquire(timeout=0 if self._lost_reason else STOP_SECONDS)
        for worker in self.workers:
            if self._lost_reason or not has_lock:  # this rank may wait for a sum that will never come
                worker.process.kill()
            with suppress(OSError):
                write_order(worker.orders, STOP)
            with suppress(OSError):
                worker.orders.close()
        if has_lock:
            self._order_lock.release()
        for worker in self.workers:
            try:
                worker.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
            worker.output.close()

    def _watch(self, worker: Worker) -> None:
        """Wait until a process ends. Unless `stop` was called, its rank is lost."""
        code = worker.process.wait()
        if not self._is_stopping:
            how = _exit_text(code)
            self._mark_lost(f"rank {worker.rank} (process {worker.process.pid}) has ended: {how}")

    def _mark_lost(self, reason: str) -> RankLost:
        """Note that a rank is lost, and call the callbacks of `on_lost`. Returns a RankLost with the first
        reason, which the later ones do not replace.
        """
        with self._lock:
            callbacks: list[Callable[[RankLost], None]] = []
            if self._lost_reason is None:
                self._lost_reason = reason
                if not self._is_stopping:
                    callbacks = list(self._on_lost)
        self._is_lost.set()  # before the callbacks: one may wait for a thread that waits for this
        error = RankLost(self._lost_reason)
        for callback in callbacks:
            callback(error)
        return error


def _pipe() -> tuple[int, int]:
    """Make a pipe -> the file descriptors of its read end and its write end, 3 or higher each.

    If this process has closed one of its standard files (descriptors 0 to 2), `os.pipe` may give out that
    number. The new process would then get a standard file of its own in place of the pipe's end.
    """
    from fcntl import F_DUPFD_CLOEXEC, fcntl  # here, since Windows has none

    ends = os.pipe()
    read_end, write_end = (fcntl(end, F_DUPFD_CLOEXEC, 3) for end in ends)
    for end in ends:
        os.close(end)
    return read_end, write_end


def _start(rank: int, lifeline: int) -> Worker:
    """Start a rank's process, which imports this package from the same folder as this process. `lifeline` is
    the read end of the pipe whose closing tells the process that rank 0 has ended.
    """
    folders = [str(Path(engine.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", WORKER, str(lifeline)],  # -P: do not import from the current folder
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None if sys.__stderr__ else subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, folders))},
        pass_fds=[lifeline],
    )
    assert process.stdin is not None
    assert process.stdout is not None
    return Worker(rank, process, process.stdin, process.stdout)


def _send_options(worker: Worker, options: dict[str, Any]) -> None:
    """Write the options of a process to its standard input, as a line of JSON."""
    with suppress(OSError):  # the process has ended already, which `Workers._watch` reports
        worker.orders.write(json.dumps(options, default=str).encode() + b"\n")
        worker.orders.flush()


def _exit_text(code: int) -> str:
    """How a process with this return code ended, in words; a negative code is a signal's."""
    return f"exit code {code}" if code >= 0 else f"signal {-code}"
