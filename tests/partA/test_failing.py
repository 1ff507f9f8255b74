"""A rank that is lost, in a step and between two, offline and served; and rank 0 gone."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch

from engine import LLM, EngineArgs, SamplingParams
from engine.cli.serving import Service
from engine.parallel import group, launch
from engine.parallel.launch import RankLost
from tests.system.ready import Popen

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
LONG = {"model": "storyteller", "prompt": "Once", "max_tokens": 900, "temperature": 0, "ignore_eos": True}
pytestmark = pytest.mark.usefixtures("orders_are_read", "forked_ranks")
DEADLINE = 240  # seconds after which what we wait for will never come: not a promise about speed
TWO = {"device": "cpu", "tensor_parallel_size": 2, "max_model_len": 256}


def workers_of(pid: int) -> list[int]:
    """The ranks' processes that this process has started."""
    listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True)
    rows = [line.split(None, 2) for line in listed.stdout.splitlines()[1:]]
    return [int(row[0]) for row in rows if int(row[1]) == pid and "engine.wiring.rank" in row[2]]


def rank_1(engine) -> int:
    """The process of this engine's rank 1, which has been forked."""
    return engine.executor.workers.workers[0].process.pid


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds: float = DEADLINE) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it has not happened in time"
        time.sleep(0.02)


@contextmanager
def server(tmp_path: Path):
    """`ruvon serve` on two ranks: (the process, its address, what it says)."""
    log = tmp_path / "log"
    command = [sys.executable, "-m", "engine.cli.main", "serve", "--device", "cpu", "--port", "0"]
    with log.open("w") as file:
        process = Popen([*command, "--tensor-parallel-size", "2"], env=ENVIRONMENT, stdout=file, stderr=file)
    try:
        wait_until(lambda: process.poll() is not None or "Uvicorn running on" in log.read_text())
        found = re.search(r"http://[0-9.:]+", log.read_text())
        assert found, log.read_text()
        yield process, found.group(), log
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def change_rank(tmp_path, monkeypatch):
    """Have the other ranks run some code first."""

    def change(code: str) -> None:
        then = "import sys\nfrom engine.wiring.rank import main\nmain(int(sys.argv[1]))\n"
        (tmp_path / "changed_rank.py").write_text(code + then)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr(launch, "WORKER", "changed_rank")

    return change


def test_a_rank_that_is_killed_ends_every_call_in_words():
    llm = LLM("storyteller", **TWO)
    stream = llm.stream("Once", SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    next(stream)
    worker = rank_1(llm.engine)
    os.kill(worker, signal.SIGKILL)
    with pytest.raises(RankLost, match=rf"rank 1 \(process {worker}\) has ended: signal 9"):
        list(stream)
    with pytest.raises(RankLost, match="rank 1"):
        llm.generate("Once", use_tqdm=False)
    llm.shutdown()


def test_what_fails_on_rank_0_after_the_others_were_told_ends_the_engine(monkeypatch):
    """Out of memory, say. The other ranks wait for its sums: no request can be spared."""
    llm = LLM("storyteller", **TWO)
    worker = rank_1(llm.engine)

    def fail(logits, batch):
        raise MemoryError("no memory for the logits")

    monkeypatch.setattr(llm.engine.executor.runner, "select", fail)
    with pytest.raises(RankLost, match="rank 0 cannot go on: MemoryError: no memory for the logits"):
        llm.generate("Once", use_tqdm=False)
    llm.shutdown()
    assert not is_running(worker)


OUT_OF_MEMORY = """
from itertools import count
import torch
from engine.execution.runner import ModelRunner
submit, number = ModelRunner.submit, count()

def out_of_memory(runner, batch, way_number):
    if next(number) == 3:
        print("a library says:", torch.get_num_threads(), "threads", flush=True)
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
    return submit(runner, batch, way_number)

ModelRunner.submit = out_of_memory
"""


def test_another_rank_without_memory_in_a_step_ends_all(change_rank, capfd, monkeypatch):
    """It says why, and ends; rank 0, which waits for its sum, says who has ended."""
    change_rank(OUT_OF_MEMORY)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 6)
        llm = LLM("storyteller", **TWO)
    worker = llm.engine.executor.workers.workers[0].process
    stream = llm.stream("Once", SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    next(stream)
    with pytest.raises(RankLost, match=rf"rank 1 \(process {worker.pid}\) has ended: exit code 1"):
        list(stream)
    with pytest.raises(RankLost, match="rank 1"):
        llm.generate("Once", use_tqdm=False)
    llm.shutdown()
    assert worker.returncode == 1
    said = capfd.readouterr().err
    assert "rank 1: OutOfMemoryError: Tried to allocate 2.00 GiB" in said
    assert "a library says: 3 threads" in said, "of 6 threads each rank has half; nobody reads its output"


def test_ranks_without_work_stay(change_rank, monkeypatch):
    """An order comes through a pipe, which waits for ever; only what waits in a sum has a limit. It is 8 s
    here, and nothing is asked for 9.
    """
    change_rank("from engine.parallel import group\ngroup.SUM_SECONDS = 8\n")
    monkeypatch.setattr(group, "SUM_SECONDS", 8)
    llm = LLM("storyteller", **TWO)
    params = SamplingParams(temperature=0, max_tokens=5)
    first = llm.generate("Once", params, use_tqdm=False)[0].outputs[0].token_ids
    time.sleep(9)
    assert llm.generate("Once", params, use_tqdm=False)[0].outputs[0].token_ids == first
    llm.shutdown()


def test_health_says_it_with_the_news():
    """No time is asked for here: as soon as the engine has been told, and nobody asks in between."""
    service, told = Service(EngineArgs(**TWO)), threading.Event()
    app = service.app([], None, False, None)

    def status() -> tuple[int, str]:
        async def ask():
            async with httpx.AsyncClient(
                transport=httpx.ASGITransport(app), base_url="http://here", timeout=DEADLINE
            ) as client:
                return await client.get("/health")

        answer = asyncio.run(ask())
        return answer.status_code, answer.text

    service.engine.on_lost.append(lambda error: told.set())  # the engine's thread is told before
    service.engine_thread.start()
    assert status()[0] == 200
    worker = rank_1(service.engine)
    os.kill(worker, signal.SIGKILL)
    assert told.wait(DEADLINE), "the engine is not told of the end of a rank"
    code, text = status()
    assert code == 503, text
    service.engine_thread.stop()
    service.engine.shutdown()


def test_served_and_killed_in_a_step(tmp_path):
    """Readers get an error, streaming and not, and never a 200 that says "abort"; the exit code is 1."""
    whole = []
    with server(tmp_path) as (process, url, log):
        (worker,) = workers_of(process.pid)

        def read_whole() -> None:
            eight = LONG | {"n": 8, "temperature": 1}
            whole.append(httpx.post(url + "/v1/completions", json=eight, timeout=DEADLINE))

        def is_running_there() -> bool:
            text = httpx.get(url + "/metrics", timeout=DEADLINE).text
            return re.search(r"vllm:num_requests_running\{.*\} [1-9]", text) is not None

        reader = threading.Thread(target=read_whole)
        reader.start()
        wait_until(is_running_there)
        with (
            httpx.Client(base_url=url, timeout=DEADLINE) as client,
            client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as answer,
        ):
            lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
            next(lines)
            os.kill(worker, signal.SIGKILL)
            told = [json.loads(line) for line in lines if line != "[DONE]"]
        reader.join(DEADLINE)
        assert told[-1]["error"]["code"] == "engine_error", told[-1]
        assert whole[0].status_code == 500, whole[0].text
        assert whole[0].json()["error"]["code"] == "engine_error", whole[0].text
        assert process.wait(DEADLINE) == 1
        assert "signal 9" in log.read_text()


def test_served_and_killed_while_idle(tmp_path):
    """/health says so, or nobody answers any more; then the exit code is 1."""
    with server(tmp_path) as (process, url, _):
        assert httpx.get(url + "/health", timeout=DEADLINE).status_code == 200
        few = LONG | {"max_tokens": 5}
        assert httpx.post(url + "/v1/completions", json=few, timeout=DEADLINE).status_code == 200
        (worker,) = workers_of(process.pid)
        metrics = httpx.get(url + "/metrics", timeout=DEADLINE).text
        assert re.search(r'ruvon:rank_up\{.*rank="1"\} 1.0', metrics)
        (panel,) = httpx.get(url + "/dashboard/data", timeout=DEADLINE).json()["panels"]
        assert [panel["value"], len(panel["rows"])] == ["2", 2]
        assert f"rank 1, process {worker}" in panel["rows"][1][0]
        killed = time.monotonic()
        os.kill(worker, signal.SIGKILL)
        while time.monotonic() < killed + DEADLINE:
            try:
                if httpx.get(url + "/health", timeout=DEADLINE).status_code == 503:
                    break
            except httpx.TransportError:
                break
            time.sleep(0.02)
        assert process.wait(DEADLINE) == 1


def test_a_rank_ends_with_the_pipe_that_rank_0_holds():
    """Whatever it does: here it waits for its options, and would in a sum."""
    read_end, life = os.pipe()
    command = [sys.executable, "-m", "engine.wiring.rank", str(read_end)]
    with subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT, stdin=-1, stdout=-1, pass_fds=[read_end]
    ) as rank:
        os.close(read_end)
        os.close(life)
        assert rank.wait(DEADLINE) == 1


def test_rank_0_gone_leaves_no_worker_behind(tmp_path):
    with server(tmp_path) as (process, _, _log):
        (worker,) = workers_of(process.pid)
        process.kill()
        wait_until(lambda: not is_running(worker))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_group_ends_all_in_good_order(tmp_path, number):
    with server(tmp_path) as (process, _, log):
        workers = workers_of(process.pid)
        for pid in [*workers, process.pid]:  # a terminal or a supervisor sends it to all of them
            os.kill(pid, number)
        assert process.wait(DEADLINE) == 0, log.read_text()
        assert not any(map(is_running, workers))


def test_a_rank_that_stops_answering_is_lost_after_the_limit_of_a_sum():
    """SIGSTOP: the process is there, and does nothing. The limit, 60 s, is 8 here."""
    code = """
import os, signal, sys, time
from engine.parallel import group
group.SUM_SECONDS = 8
from engine import LLM, SamplingParams
from tests.partA.test_failing import workers_of
if __name__ == "__main__":
    llm = LLM("storyteller", device="cpu", tensor_parallel_size=2, max_model_len=256)
    (worker,) = workers_of(os.getpid())
    os.kill(worker, signal.SIGSTOP)
    start = time.monotonic()
    try:
        llm.generate("Once", SamplingParams(max_tokens=5), use_tqdm=False)
    except BaseException as error:
        print(type(error).__name__, 7 < time.monotonic() - start < 60, error)
    os.kill(worker, signal.SIGCONT)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.stdout.startswith("RankLost True rank 0 cannot go on"), (done.stdout, done.stderr[-2000:])
