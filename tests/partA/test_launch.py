"""The processes of the ranks, without a model: a small script stands in for each rank."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from engine.parallel import launch
from engine.parallel.launch import RankLost, Workers
from engine.parallel.orders import STEP, STOP
from tests.partA.test_failing import DEADLINE, is_running, wait_until

ROOT = Path(__file__).parents[2]
# Says that it is ready, and reads orders until the one to stop; or does what its options say.
STANDS_IN = """
import json, os, struct, sys, threading

def end_with(life):
    os.read(life, 1)
    os._exit(1)

threading.Thread(target=end_with, args=(int(sys.argv[1]),), daemon=True).start()
hello = json.loads(sys.stdin.buffer.readline())
print("a library's words", flush=True)
if "exit" in hello:
    os._exit(hello["exit"])
print("ready", flush=True)
os.dup2(2, 1)
if "deaf" in hello:
    threading.Event().wait(100)
while len(header := sys.stdin.buffer.read(16)) == 16:
    kind, length = struct.unpack("=qq", header)
    if kind == 2:
        break
    sys.stdin.buffer.read(length)
    if length == 4:
        os._exit(3)
os._exit(0)
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Start workers that run STANDS_IN; what is left is stopped after the test."""
    (tmp_path / "stands_in_for_a_rank.py").write_text(STANDS_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(launch, "WORKER", "stands_in_for_a_rank")
    monkeypatch.setattr(launch, "STOP_SECONDS", 2 * DEADLINE)  # nothing here may wait for this limit
    started = []

    def start(size=3, options=lambda rank: {}):
        started.append(Workers(size, options))
        return started[-1]

    yield start
    for workers in started:
        workers.stop()


def open_files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_nothing_is_left_after_a_stop(start):
    start().stop()  # the first start opens what stays open
    before, threads = open_files(), threading.active_count()
    workers = start()
    workers.wait_until_ready()
    folder = Path(workers.store).parent
    at_end = []
    workers.on_stop(lambda: at_end.append(True))
    workers.send_order(STEP, b"12345678")
    begin = time.monotonic()
    workers.stop()
    workers.stop()
    assert time.monotonic() - begin < DEADLINE, "the processes were not told to stop"
    assert [worker.process.returncode for worker in workers.workers] == [0, 0], "they ended by themselves"
    assert at_end == [True], "once"
    assert not folder.exists()
    wait_until(lambda: threading.active_count() <= threads)
    assert open_files() == before
    with pytest.raises(RankLost, match="has been shut down"):
        workers.send_order(STEP)


def test_a_rank_that_ends_is_told_once_and_then_always(start):
    before = open_files()
    workers = start(4)
    workers.wait_until_ready()
    told = []
    workers.on_lost(told.append)
    first, second, third = workers.workers
    threads = threading.active_count()
    os.kill(second.process.pid, signal.SIGKILL)
    wait_until(lambda: threading.active_count() <= threads - 1)
    threads -= 1
    wait_until(lambda: told)
    words = rf"rank 2 \(process {second.process.pid}\) has ended: signal 9"
    began = []
    with pytest.raises(RankLost, match=words), workers.raising_rank_lost():
        began.append("a step, though a rank is lost")
    assert began == []
    os.kill(third.process.pid, signal.SIGKILL)
    wait_until(lambda: threading.active_count() <= threads - 1)
    later = []
    workers.on_lost(later.append)
    assert [str(error) for error in later] == [str(error) for error in told], (
        "at once, if one is lost already"
    )
    os.kill(first.process.pid, signal.SIGSTOP)  # as a rank that waits for a sum
    begin = time.monotonic()
    workers.stop()
    assert time.monotonic() - begin < DEADLINE, "it was not killed"
    assert not is_running(first.process.pid)
    assert len(told) == 1, "the others' end is no further loss"
    assert open_files() == before


def test_nobody_looks_again_and_again_whether_a_rank_is_there(start):
    """The system tells of its end, at once: the threads that wait for this sleep until then."""
    before = set(threading.enumerate())
    workers = start()
    workers.wait_until_ready()
    watching = [thread.native_id for thread in set(threading.enumerate()) - before]
    assert len(watching) == 2, "a thread for each rank"

    def awakenings() -> list[str]:
        files = [Path(f"/proc/self/task/{thread}/status").read_text() for thread in watching]
        return [line for file in files for line in file.splitlines() if line.startswith("voluntary_ctxt")]

    def sleep_on() -> bool:
        first = awakenings()
        time.sleep(2)
        return awakenings() == first

    wait_until(sleep_on)


def test_a_failure_here_waits_for_the_news_of_the_rank_that_caused_it(start, monkeypatch):
    monkeypatch.setattr(launch, "CAUSE_SECONDS", 2 * DEADLINE)
    begin = time.monotonic()
    workers = start(2)
    workers.wait_until_ready()
    workers.send_order(STEP, b"1234")  # rank 1 ends
    with (
        pytest.raises(RankLost, match=r"rank 1 \(process \d+\) has ended: exit code 3"),
        workers.raising_rank_lost(),
    ):
        raise RuntimeError("connection reset by peer")
    assert time.monotonic() - begin < DEADLINE, "the news ends the wait"


def test_who_waits_for_the_cause_hears_of_it_before_the_callbacks_have_returned(start, monkeypatch):
    """The engine's callback waits until the thread that steps has ended."""
    monkeypatch.setattr(launch, "CAUSE_SECONDS", 2 * DEADLINE)
    workers, has_failed, told = start(2), threading.Event(), []
    workers.wait_until_ready()
    workers.on_lost(lambda error: told.append(has_failed.wait(DEADLINE)))
    workers.send_order(STEP, b"1234")  # rank 1 ends
    with pytest.raises(RankLost, match=r"rank 1 \(process \d+\) has ended"), workers.raising_rank_lost():
        raise RuntimeError("connection reset by peer")
    has_failed.set()
    wait_until(lambda: told)
    assert told == [True], "the callback and the step have waited for each other"


def test_a_stop_ends_the_wait_for_the_cause_and_whoever_asks_later_hears_of_it(start, monkeypatch):
    monkeypatch.setattr(launch, "CAUSE_SECONDS", 2 * DEADLINE)
    workers, before, later = start(2), [], []
    workers.wait_until_ready()
    workers.on_lost(before.append)
    begin = time.monotonic()

    def step():
        with workers.raising_rank_lost():
            workers.stop()
            raise RuntimeError("a pipe is closed")

    with pytest.raises(RankLost, match="has been shut down"):
        step()
    assert time.monotonic() - begin < DEADLINE, "no rank is left whose end could be the cause"
    workers.on_lost(later.append)
    assert [str(error) for error in later] == ["the engine has been shut down"]
    assert before == [], "a stop is no loss"


@pytest.mark.parametrize("code", [0, 7])
def test_a_rank_that_ends_at_its_start(start, code):
    workers = start(options=lambda rank: {"exit": code} if rank == 2 else {})
    with pytest.raises(RankLost, match=f"rank 2 has ended at its start: exit code {code}"):
        workers.wait_until_ready()


def test_a_rank_that_has_ended_before_its_options_are_sent(start, monkeypatch):
    """Nobody reads them, which is no error of its own."""
    start_one = launch._start

    def end_at_once(rank, life):
        worker = start_one(rank, life)
        worker.process.kill()
        worker.process.wait()
        return worker

    monkeypatch.setattr(launch, "_start", end_at_once)
    with pytest.raises(RankLost, match="rank 1 has ended at its start: signal 9"):
        start(2).wait_until_ready()


def test_a_rank_has_a_standard_error_where_this_process_has_none(start, monkeypatch):
    """Else the first file that it opens would be its standard error, and get what a library says."""
    monkeypatch.setattr(sys, "__stderr__", None)
    workers = start(2)
    workers.wait_until_ready()
    assert os.readlink(f"/proc/{workers.workers[0].process.pid}/fd/2") == os.devnull


def test_a_process_that_cannot_be_started_leaves_none(start, monkeypatch):
    before, started, start_one = open_files(), [], launch._start

    def fail_later(rank, life):
        if rank == 2:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        started.append(start_one(rank, life))
        return started[-1]

    monkeypatch.setattr(launch, "_start", fail_later)
    with pytest.raises(BlockingIOError):
        start()
    (worker,) = started
    assert worker.process.returncode == -signal.SIGKILL
    assert open_files() == before


def test_the_working_directory_brings_no_module(start, tmp_path, monkeypatch):
    """A folder may have an engine of its own, or a json.py."""
    here = tmp_path / "here"
    here.mkdir()
    for name in ("json", "stands_in_for_a_rank"):
        (here / f"{name}.py").write_text("raise SystemExit(5)")
    monkeypatch.chdir(here)
    start().wait_until_ready()


def test_a_fork_leaves_the_ranks_to_the_process_that_made_them(start):
    """It may compute with one thread, and its exit calls what atexit has."""
    workers = start()
    workers.wait_until_ready()
    if not (child := os.fork()):
        signal.alarm(DEADLINE)
        try:
            workers.send_order(STEP, b"1234")
        except RankLost as error:
            workers.stop()
            os._exit(0 if "forked" in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    workers.send_order(STEP, b"12345678")
    assert all(worker.process.poll() is None for worker in workers.workers)


def test_an_order_goes_to_every_rank(start):
    workers = start()
    workers.send_order(STEP, b"1234")  # each ends
    assert [worker.process.wait(DEADLINE) for worker in workers.workers] == [3, 3]


@pytest.mark.parametrize(
    ("end", "closed"),
    [
        ("os.kill(os.getpid(), 9)", ""),
        ("os._exit(1)", ""),
        ("os.kill(os.getpid(), 9)", "<&-"),
        ("os._exit(1)", "2>&-"),
    ],
)
def test_no_rank_outlives_this_process(start, tmp_path, end, closed):
    """However it ends, and whatever of its standard files is closed."""
    script = tmp_path / "script.py"
    script.write_text(f"""
import os, sys
from engine.parallel import launch
launch.WORKER = "stands_in_for_a_rank"
workers = launch.Workers(3, lambda rank: {{"deaf": True}})  # as in a sum
workers.wait_until_ready()
print(*(worker.process.pid for worker in workers.workers), flush=True)
{end}
""")
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" "$1" {closed}', sys.executable, script],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"},
        stdout=subprocess.PIPE,
        timeout=DEADLINE,
        check=False,
    )
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2, "they were not ready"
    wait_until(lambda: not any(map(is_running, pids)))


def in_a_thread(work) -> tuple[threading.Thread, list[BaseException]]:
    """Run `work` in a thread -> the thread, and what `work` has raised."""
    raised = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, raised


def test_an_order_under_way_reaches_every_rank_before_the_order_to_stop(start, monkeypatch):
    """Else the rank that has it waits in its sums for one that has ended."""
    write, written, under_way, is_stopped = launch.write_order, [], threading.Event(), threading.Event()

    def write_slowly(file, kind, payload=b""):
        if kind == STEP and written:  # the second rank's
            under_way.set()
            is_stopped.wait(0.5)
        write(file, kind, payload)
        written.append(kind)
        if kind == STOP:
            is_stopped.set()

    monkeypatch.setattr(launch, "write_order", write_slowly)
    workers = start()
    workers.wait_until_ready()
    sending, raised = in_a_thread(lambda: workers.send_order(STEP, b"12345678"))
    assert under_way.wait(DEADLINE)
    workers.stop()
    sending.join(DEADLINE)
    assert (written, raised) == ([STEP, STEP, STOP, STOP], [])
    assert [worker.process.returncode for worker in workers.workers] == [0, 0], "they ended by themselves"


def test_a_rank_that_does_not_read_an_order_does_not_keep_a_stop_waiting(start, monkeypatch):
    monkeypatch.setattr(launch, "STOP_SECONDS", 0.1)
    workers = start(options=lambda rank: {"deaf": True})
    workers.wait_until_ready()
    sending, raised = in_a_thread(lambda: workers.send_order(STEP, bytes(2**22)))  # no pipe holds as many
    wait_until(workers._order_lock.locked)
    stopping, problems = in_a_thread(workers.stop)
    stopping.join(DEADLINE)
    assert not stopping.is_alive(), "it waits for an order that nobody reads"
    assert problems == []
    sending.join(DEADLINE)
    assert not any(is_running(worker.process.pid) for worker in workers.workers)
    assert [type(error) for error in raised] == [RankLost]
