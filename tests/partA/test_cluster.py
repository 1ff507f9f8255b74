"""`ruvon cluster` as its users meet it: two replicas behind one address, on a Ray of their own.

One start of Ray (some 20 seconds) for most claims, which stand in the order in which they are made. Ray lives
in an environment of its own: `make cluster-test`.
"""

import os
import queue
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import openai
import psutil
import pytest

pytest.importorskip("ray", reason="needs Ray: pip install 'ruvon[cluster]'")

ROOT = Path(__file__).parents[2]
START_SECONDS = 240.0  # after which what we wait for will never come: not a promise about speed
REPLACED_SECONDS = 30.0  # for a new replica in the place of a dead one
# With a token of its own, Ray writes none into the home folder.
ENVIRONMENT = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
ENVIRONMENT |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
COMMAND = [sys.executable, "-m", "engine.cli.main", "cluster"]
MODEL = "storyteller"
LONG = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 900, "temperature": 0, "stream": True}
LONG |= {"extra_body": {"ignore_eos": True}}
SHORT = {"model": MODEL, "prompt": "The dog", "max_tokens": 8, "temperature": 0}
# Read by every Python process of the cluster: a replica whose process id is a file's name ends its engine's
# thread, as a bug would.
KILLER = """
import os, pathlib, sys, threading, time
def watch():
    folder = pathlib.Path({folder!r})
    while not (folder / str(os.getpid())).exists():
        time.sleep(0.1)
    for thread in threading.enumerate():
        if thread.name == "engine":
            thread._target.__self__._commands.put(sys.exit)
threading.Thread(target=watch, daemon=True).start()
"""


class Cluster:
    """The command in a process of its own, with what it says."""

    def __init__(self, folder: Path, *flags: str, address: str = "local") -> None:
        self.folder, self.log = folder, folder / "log.txt"
        (folder / "sitecustomize.py").write_text(KILLER.format(folder=str(folder)))
        variables = ENVIRONMENT | {"RAY_ADDRESS": address}
        paths = os.pathsep.join([str(ROOT), str(folder)])
        variables |= {"PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*COMMAND, "--port", "0", *flags],
                cwd=ROOT,
                env=os.environ | variables,
                stdout=log,
                stderr=log,
            )
        self.url = self.wait_until_ready(1)

    def wait_until_ready(self, times: int) -> str:
        """Until it has said so as often."""
        deadline = time.monotonic() + START_SECONDS
        while len(urls := re.findall(r"replicas of \S+ at (\S+);", self.log.read_text())) < times:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)
        return urls[-1]

    def processes(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def replicas(self) -> dict[int, psutil.Process]:
        return {p.pid: p for p in self.processes() if p.name().startswith("ray::ServeRepl")}

    def client(self, session: str | None = None) -> openai.OpenAI:
        headers = {"x-session-id": session} if session else None
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="secret", max_retries=0, default_headers=headers
        )

    def metric(self, name: str, **labels: str) -> dict[str, float]:
        """By engine, the value of a metric in one scrape of /metrics."""
        text = httpx.get(f"{self.url}/metrics", timeout=60).raise_for_status().text
        found = {}
        for line in text.splitlines():
            if match := re.fullmatch(rf"{name}\{{(.*)\}} (\S+)", line):
                named = dict(re.findall(r'(\w+)="([^"]*)"', match[1]))
                if labels.items() <= named.items():
                    found[named["engine"]] = float(match[2])
        return found

    def wait_for_replicas(self, without: int) -> float:
        """Seconds until two replicas answer a scrape and none of them is the process `without`."""
        start = time.monotonic()
        while without in self.replicas() or len(self.metric("process_resident_memory_bytes")) < 2:
            assert time.monotonic() - start < START_SECONDS, self.log.read_text()
            time.sleep(0.1)
        return time.monotonic() - start

    def working_replica(self) -> int:
        """The process id of the replica that computes just now."""

        def seconds() -> dict[int, float]:
            return {pid: sum(process.cpu_times()[:2]) for pid, process in self.replicas().items()}

        before = seconds()
        time.sleep(0.4)
        return max(seconds().items(), key=lambda item: item[1] - before[item[0]])[0]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    cluster = Cluster(tmp_path_factory.mktemp("cluster"), "--api-key", "secret", "--max-num-seqs", "4")
    yield cluster
    if cluster.process.poll() is None:
        cluster.process.terminate()
        cluster.process.wait(60)


def test_what_is_wrong_is_said_in_a_line_before_ray_is_started():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refusal("--port", str(port))
        assert (
            said
            == f"ruvon cluster: port {port} of 127.0.0.1 is in use: try --port {port + 1}, or --port 0 "
            + ("for any that is free\n")
        )
    assert "--lora-modules" in refusal("--enable-lora", "--lora-dir", "adapters")
    assert "no-such-model" in refusal("--model", "./no-such-model")
    assert "needs max_replicas" in refusal("--min-replicas", "1")
    assert "max_replicas=1 is accepted" in refusal("--max-replicas", "1")


def refusal(*flags: str) -> str:
    start = time.monotonic()
    done = subprocess.run(
        [*COMMAND, *flags],
        cwd=ROOT,
        env=os.environ | ENVIRONMENT | {"RAY_ADDRESS": "local", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
    )
    assert done.returncode == 1, (done.stderr, time.monotonic() - start)
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_streams_come_from_both_replicas_chunk_by_chunk(cluster):
    """Two streams at once: each replica computes one of two sessions, and no proxy holds text back."""
    one, other = two_sessions(cluster)
    before = cluster.metric("vllm:generation_tokens_total")
    arrivals: dict[str, list[float]] = {one: [], other: []}

    def read(session: str) -> None:
        for chunk in cluster.client(session).completions.create(**LONG | {"max_tokens": 200}):
            if chunk.choices and chunk.choices[0].text:
                arrivals[session].append(time.monotonic())

    readers = [threading.Thread(target=read, args=(session,)) for session in arrivals]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(START_SECONDS)
    after = cluster.metric("vllm:generation_tokens_total")
    assert {engine: after[engine] - before[engine] for engine in after} == {"0": 200, "1": 200}
    for moments in arrivals.values():
        assert len(moments) > 150
        first, middle, last = moments[0], moments[len(moments) // 2], moments[-1]
        assert middle - first > 0.1 * (last - first), "half of the text came at once: it was held back"
        assert last - middle > 0.1 * (last - first), "half of the text came at once: it was held back"


def two_sessions(cluster: Cluster) -> tuple[str, str]:
    """The names of two sessions that are at different replicas."""
    at: dict[str, str] = {}
    for number in range(32):
        at.setdefault(engine_of(cluster, f"session-{number}"), f"session-{number}")
        if len(at) == 2:
            return at["0"], at["1"]
    raise AssertionError(f"32 sessions are all at one replica: {at}")


def engine_of(cluster: Cluster, session: str, times: int = 1) -> str:
    """The rank of the replica that answers this session's requests: one and the same."""
    before = cluster.metric("vllm:request_success_total", finished_reason="length")
    for _ in range(times):
        cluster.client(session).completions.create(**SHORT)
    after = cluster.metric("vllm:request_success_total", finished_reason="length")
    more = {engine: after[engine] - before[engine] for engine in after if after[engine] > before[engine]}
    assert list(more.values()) == [times], f"requests of one session went to several replicas: {more}"
    return next(iter(more))


def test_a_session_stays_at_one_replica(cluster):
    for session in two_sessions(cluster):
        engine_of(cluster, session, times=6)


def test_one_scrape_shows_both_replicas(cluster):
    text = httpx.get(f"{cluster.url}/metrics").text
    helps = Counter(re.findall(r"^# HELP (\S+)", text, re.MULTILINE))
    assert set(helps.values()) == {1}, "a metric is described twice: Prometheus takes it for two"
    samples = [line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(samples) == len(set(samples)), "two samples have one name and the same labels"
    assert set(cluster.metric("vllm:num_requests_running")) == {"0", "1"}
    assert set(cluster.metric("process_resident_memory_bytes")) == {"0", "1"}
    assert "\nruvon:replicas 2.0\n" in text


def test_the_dashboard_shows_one_replica_and_says_which(cluster):
    headers = {"Authorization": "Bearer secret"}
    names = {
        httpx.get(f"{cluster.url}/dashboard/data", headers=headers).json()["model_name"] for _ in range(8)
    }
    assert names == {f"{MODEL}, replica 0 of 2"}


def test_the_api_key_and_the_hosts_are_serves(cluster):
    assert httpx.post(f"{cluster.url}/v1/completions", json=SHORT).status_code == 401
    assert httpx.get(f"{cluster.url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{cluster.url}/health", headers={"Host": "attacker.example"}).status_code == 400


def test_only_the_address_that_was_asked_for_is_this_machines_alone(cluster):
    """What the help says of the network: Ray's own ports are open to every interface."""
    port = int(cluster.url.rpartition(":")[2])
    listening = [
        connection.laddr
        for process in [psutil.Process(cluster.process.pid), *cluster.processes()]
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert {address.ip for address in listening if address.port == port} == {"127.0.0.1"}
    to_all = [address for address in listening if address.ip in ("0.0.0.0", "::")]
    assert 5 <= len(to_all) <= 40, f"the help says some 15 ports: {to_all}"
    said = subprocess.run([*COMMAND, "--help"], cwd=ROOT, capture_output=True, text=True).stdout
    assert "for a private network only" in " ".join(re.sub("[│|]", " ", said).split())


def end_of(stream: openai.Stream) -> Exception:
    """The error that a reader of a broken stream gets."""
    try:
        for chunk in stream:
            assert chunk.choices[0].finish_reason is None, "a broken answer looks like a whole one"
    except (openai.APIError, httpx.HTTPError) as error:
        return error
    raise AssertionError("the stream has ended as if it were whole")


def test_a_replica_killed_in_mid_stream(cluster):
    """Its reader gets an error, the next request is answered by the other, and a new one takes its place."""
    stream = cluster.client().completions.create(**LONG)
    for _ in range(10):
        next(stream)
    killed = cluster.working_replica()
    os.kill(killed, signal.SIGKILL)
    start = time.monotonic()
    error = end_of(stream)
    error_seconds = time.monotonic() - start
    answer = cluster.client().completions.create(**SHORT)
    answered_seconds = time.monotonic() - start - error_seconds
    replaced_seconds = error_seconds + answered_seconds + cluster.wait_for_replicas(without=killed)
    timeline = f"error {error_seconds:.2f} s, answer {answered_seconds:.2f} s, two {replaced_seconds:.1f} s"
    print(f"\nafter SIGKILL: {timeline}; the client's error: {error!r}")
    assert answer.usage.completion_tokens == SHORT["max_tokens"]
    assert error_seconds < 2, timeline
    assert answered_seconds < 1, timeline
    assert replaced_seconds < REPLACED_SECONDS, timeline


def test_a_replica_whose_engine_has_ended_is_replaced(cluster):
    """Its process lives, and answers: Ray learns of it by asking the backend."""
    stream = cluster.client().completions.create(**LONG)
    next(stream)
    ended = cluster.working_replica()
    start = time.monotonic()
    (cluster.folder / str(ended)).touch()
    end_of(stream)
    cluster.wait_for_replicas(without=ended)  # with no promise of how soon: Ray asks three times first
    print(f"\nafter the engine's end: two replicas in {time.monotonic() - start:.1f} s")
    assert cluster.client().completions.create(**SHORT).usage.completion_tokens == SHORT["max_tokens"]


def test_a_rolling_restart_refuses_no_request(cluster):
    before = set(cluster.replicas())
    is_over = threading.Event()
    outcomes: queue.SimpleQueue[str] = queue.SimpleQueue()

    def ask(user: int) -> None:
        client = cluster.client(f"user-{user}" if user % 2 else None)
        while not is_over.is_set():
            try:
                text = client.completions.create(**SHORT).choices[0].text
                outcomes.put("answered" if text else "empty")
            except openai.OpenAIError as error:
                outcomes.put(repr(error))

    users = [threading.Thread(target=ask, args=(user,)) for user in range(3)]
    for user in users:
        user.start()
    start = time.monotonic()
    cluster.process.send_signal(signal.SIGHUP)
    cluster.wait_until_ready(2)
    seconds = time.monotonic() - start
    time.sleep(1)
    is_over.set()
    for user in users:
        user.join(START_SECONDS)
    seen = Counter(outcomes.get() for _ in range(outcomes.qsize()))
    print(f"\nrolling restart in {seconds:.1f} s: {dict(seen)}")
    assert set(seen) == {"answered"}
    assert seen["answered"] > 20
    assert not before & set(cluster.replicas()), "a replica was not restarted"


def test_sigterm_lets_a_stream_end_and_leaves_no_process(cluster):
    everybody, said_before = cluster.processes(), cluster.log.read_text()
    stream = cluster.client().completions.create(**LONG | {"max_tokens": 300})
    next(stream)
    cluster.process.send_signal(signal.SIGTERM)
    time.sleep(1.5)
    refused = httpx.post(
        f"{cluster.url}/v1/completions", json=SHORT, headers={"Authorization": "Bearer secret"}, timeout=60
    )
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    *_, last = stream
    assert last.choices[0].finish_reason == "length", "300 tokens take less than the 10 s there are"
    assert cluster.process.wait(60) == 0, cluster.log.read_text()
    _, alive = psutil.wait_procs(everybody, timeout=20)
    assert not alive, [process.cmdline() for process in alive]
    assert cluster.log.read_text() == said_before, "an end in good order has nothing to say"


def test_the_same_command_joins_a_cluster_that_ray_start_made(tmp_path):
    """It ends what it started there, and leaves Ray alone."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    head = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--num-cpus=1"]
    head += [f"--port={address.partition(':')[2]}", "--include-dashboard=false", "--disable-usage-stats"]
    paths = os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
    log = tmp_path / "head.txt"
    with log.open("w") as file:
        ray = subprocess.Popen(head, cwd=ROOT, env=paths, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + START_SECONDS
        while "Ray runtime started" not in log.read_text():
            assert ray.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        cluster = Cluster(tmp_path, "--replicas", "1", address=address)
        answer = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="-").completions.create(**SHORT)
        assert answer.usage.completion_tokens == SHORT["max_tokens"]
        assert not cluster.replicas(), "a replica belongs to the Ray that was there"
        second = subprocess.run(
            [*COMMAND, "--port", "0"],
            cwd=ROOT,
            env=paths | {"RAY_ADDRESS": address},
            capture_output=True,
            text=True,
        )
        assert second.returncode == 1
        assert "Ray Serve runs on this Ray cluster already" in second.stderr
        cluster.process.send_signal(signal.SIGINT)
        assert cluster.process.wait(120) == 0, cluster.log.read_text()
        names = [process.name() for process in psutil.Process(ray.pid).children(recursive=True)]
        assert not [name for name in names if name.startswith("ray::Serve")], names
        assert ray.poll() is None
    finally:
        ray.terminate()
        ray.wait(120)
