"""`ruvon cluster`: the app of `ruvon serve` in several processes, behind Ray Serve's proxy. Extension A.

A request's way: Ray's proxy (one on each machine that has a replica) reads it, its router chooses a replica,
and the replica's app answers through Ray; chunks of a stream pass as they come. Each replica is a process
with an engine of its own, and knows nothing of the others, but that /metrics asks them all.

Promises that Ray replaces a replica whose process has died or whose engine has ended or hangs; that Ctrl-C
and SIGTERM refuse new requests, let those under way end as `ruvon serve` does, and leave no process of Ray's
that was started here. A stream whose replica dies ends with an error, and is not resumed.

The only file that imports Ray: extra `cluster`. engine/cli/many_devices.py has the flags.
"""

import gc
import logging
import os
import queue
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import ray
from fastapi import Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from ray import serve
from ray.serve.exceptions import RayServeException
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from engine.cli.many_devices import ClusterFlags
from engine.cli.serve import listen
from engine.cli.serve_flags import ServeFlags
from engine.cli.serving import Service, allowed_hosts
from engine.machine.collector import NEW_OBJECTS
from engine.models.config import ModelConfig
from engine.server.errors import RequestError
from engine.server.limits import MAX_REQUESTS, SHUTDOWN_SECONDS, SWITCH_SECONDS
from engine.server.shutdown import LAST_EVENT_SECONDS
from engine.server.telemetry_routes import METRICS_TYPE
from engine.telemetry.cost_accounting import CostAccounting
from engine.telemetry.history import DATA_PATH
from engine.wiring.engine_args import EngineArgs
from engine.wiring.loading import one_thread_if_small, public_name

NAME = "ruvon"  # of the application and its deployment
OBJECT_STORE_BYTES = 2**27  # of shared memory, of which answers need next to nothing; Ray's default is 30%
HEALTH_SECONDS = 1  # between two questions whether a replica is well; three bad answers, and it is replaced
SILENT_SECONDS = 10  # without an answer: a bad one
ANSWER_SECONDS = 5  # for a replica to answer a question of ours
QUIET = {"log_level": "WARNING", "enable_access_log": False}  # Ray writes a line for each request
POLL_SECONDS = 0.2  # between two looks of this command at what it waits for
ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"  # by the header x-session-id
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Signals = queue.SimpleQueue[int]  # that have come and were not dealt with
SEATS = {True: 256, False: 16}  # on a GPU, or not: the default of max_num_seqs


class Replica:
    """One engine and its app: what Ray runs in a process of its own, R times."""

    def __init__(self, args: EngineArgs, flags: ServeFlags, folder: str) -> None:
        """`folder`: the command's, to which relative paths belong. Raises CheckpointError or ValueError."""
        if Path(folder).is_dir():  # another machine may not have it
            os.chdir(folder)
        name = serve.get_replica_context().replica_tag
        args = replace(args, record=own_file(args.record, name))
        log = own_file(flags.cost_log, name)
        one_thread_if_small(args.model, args.model_impl)
        self.costs = CostAccounting.parse(flags.price_per_hour, flags.api_price, log, flags.cost_weights)
        self.service = Service.of(args, flags)
        hosts = allowed_hosts(flags.host, flags.allowed_host or ())
        app = self.service.app(hosts, flags.key(), flags.allow_priority, self.costs, flags.root_path)
        # In front of the app's own routes, which tell of one engine, and behind its gates.
        app.router.routes.insert(0, Route("/metrics", self.scrape))
        app.router.routes.insert(0, Route(DATA_PATH, self.data))
        self._app = app
        self._is_closing = False
        # As `ruvon serve` has its process (engine/server/run.py says why).
        gc.collect()
        gc.freeze()
        gc.set_threshold(NEW_OBJECTS)
        sys.setswitchinterval(SWITCH_SECONDS)

    def __serve_build_asgi_app__(self) -> Starlette:
        """Ray's name for it. Ray also opens the app's lifespan, which starts the engine's thread."""
        return self._app

    def __del__(self) -> None:
        """Ray calls it when the replica has no request any more and its app has ended."""
        if self.costs:
            self.costs.end()

    async def check_health(self) -> None:
        """Ray asks every HEALTH_SECONDS. Raises RuntimeError: the engine has ended, or hangs."""
        try:
            if not self._is_closing:
                self.service.backend.health()
        except RequestError as error:
            raise RuntimeError(str(error)) from None

    # What all replicas are asked at once (`broadcast`), by one of them or by the command.

    async def metrics(self) -> tuple[int, list[Metric]]:
        """(this replica's rank, what its /metrics would tell)."""
        return self.rank(), list(self.service.metrics.registry.collect())

    async def snapshot(self) -> tuple[int, dict]:
        """(this replica's rank, what its dashboard shows)."""
        return self.rank(), self.service.metrics.snapshot()

    async def begin_shutdown(self, seconds: float) -> None:
        """Refuse new requests; the server ends in `seconds`."""
        self._is_closing = True
        self.service.backend.begin_shutdown(seconds)

    async def is_idle(self) -> bool:
        return self.service.backend.idle

    async def end_all(self) -> None:
        """End the requests under way with what they have."""
        self.service.backend.end_all()

    def rank(self) -> int:
        """This replica's number, from 0. It may change when others come and go."""
        return serve.get_replica_context().rank.rank

    async def _ask_all(self, method: str) -> dict[int, Any]:
        """By rank, what each replica answers; one that has just died is left out. Raises RequestError: one
        does not answer.
        """
        me = serve.get_replica_context()
        handle = serve.get_deployment_handle(me.deployment, me.app_name)
        response = handle.broadcast(method)
        try:
            answers = await response.results_async(timeout_s=ANSWER_SECONDS, return_exceptions=True)
        except TimeoutError:
            raise RequestError(503, f"a replica has not answered in {ANSWER_SECONDS} s") from None
        return dict(answer for answer in answers if not isinstance(answer, BaseException))

    async def scrape(self, request: Request) -> Response:
        """All replicas' metrics in one text."""
        text = generate_latest(gathered(await self._ask_all("metrics")))
        return Response(text, media_type=METRICS_TYPE)

    async def data(self, request: Request) -> Response:
        """The dashboard's numbers: always the first replica's, or the page would jump from one to another."""
        snapshots = await self._ask_all("snapshot")
        first = min(snapshots)
        name = f"{snapshots[first]['model_name']}, replica {first} of {len(snapshots)}"
        return JSONResponse(snapshots[first] | {"model_name": name}, headers={"Cache-Control": "no-store"})


def own_file(path: Any, replica: str) -> Any:
    """The path with a replica's name in it, since two would write into one file: costs.csv, costs-abc.csv."""
    return None if path is None else str(Path(path).with_stem(f"{Path(path).stem}-{replica}"))


class _Collected:
    """A collector of what was collected elsewhere, as prometheus_client wants one."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics


def gathered(metrics_by_rank: Mapping[int, list[Metric]]) -> CollectorRegistry:
    """Each metric once, with the samples of all replicas: the label `engine`, as vLLM has it, is the rank."""
    metrics: dict[str, Metric] = {}
    for rank, collected in sorted(metrics_by_rank.items()):
        for metric in collected:
            whole = metrics.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
            for sample in metric.samples:
                labels = sample.labels | {"engine": str(rank)}
                whole.add_sample(sample.name, labels, sample.value, sample.timestamp, sample.exemplar)
    answered = GaugeMetricFamily(
        "ruvon:replicas", "Replicas that answered this scrape.", len(metrics_by_rank)
    )
    registry = CollectorRegistry()
    registry.register(_Collected([*metrics.values(), answered]))
    return registry


def application(args: EngineArgs, flags: ServeFlags, scale: ClusterFlags) -> Any:
    """What Ray Serve is to run. Ray must have been started: its machines say what a replica may take.

    Raises CheckpointError or ValueError for what no replica could do.
    """
    check(args, flags)
    has_gpu = str(args.device) != "cpu" and ray.cluster_resources().get("GPU", 0) > 0
    num_gpus = args.tensor_parallel_size if has_gpu else 0
    cores = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    most = scale.max_replicas or scale.replicas
    num_cpus = scale.num_cpus or (1 if has_gpu else share_of_cores(cores, most))
    if scale.max_replicas is None:
        settings: dict[str, Any] = {"num_replicas": scale.replicas}
    else:
        autoscaling = {
            "min_replicas": scale.min_replicas or 1,
            "initial_replicas": scale.replicas,
            "max_replicas": scale.max_replicas,
            "target_ongoing_requests": scale.target_ongoing_requests or args.max_num_seqs or SEATS[has_gpu],
        }
        settings = {"autoscaling_config": autoscaling}
    if scale.sticky_sessions:
        settings["request_router_config"] = {"request_router_class": ROUTER}
    seconds = SHUTDOWN_SECONDS if flags.shutdown_timeout is None else flags.shutdown_timeout
    deployment = serve.deployment(
        serve.ingress()(Replica),
        name=NAME,
        ray_actor_options={"num_cpus": num_cpus, "num_gpus": num_gpus},
        max_ongoing_requests=MAX_REQUESTS,  # the app itself refuses before that, in OpenAI's words
        graceful_shutdown_timeout_s=seconds + LAST_EVENT_SECONDS,
        health_check_period_s=HEALTH_SECONDS,
        health_check_timeout_s=SILENT_SECONDS,
        max_constructor_retry_count=1,  # what is wrong with a model is wrong the second time, too
        **settings,
    )
    return deployment.bind(args, flags, os.getcwd())


def check(args: EngineArgs, flags: ServeFlags) -> None:
    """Say what is wrong before a process is started. Raises CheckpointError or ValueError."""
    if flags.lora_dir:
        raise ValueError(
            "--lora-dir: an adapter that a client loads would be in one replica only; name adapters with "
            "--lora-modules"
        )
    if str(args.device).startswith("cuda:"):
        raise ValueError(f"device={str(args.device)!r}: Ray chooses each replica's GPUs; cuda is accepted")
    flags.key()
    CostAccounting.parse(flags.price_per_hour, flags.api_price, None, flags.cost_weights)
    ModelConfig.from_pretrained(args.model, args.model_impl)


def share_of_cores(cores: list[int], replicas: int) -> int:
    """The most cores a replica can have so that all find room on machines with these; at least 1."""
    return next((n for n in range(max(cores), 1, -1) if sum(core // n for core in cores) >= replicas), 1)


def build(arguments: dict[str, Any]) -> Any:
    """For a Serve config file, such as a RayService's: `import_path: engine.cli.cluster:build`, and as `args`
    the flags of `ruvon cluster`, with underscores. Raises ValueError, or TypeError: there is no such flag.
    """
    kinds: tuple[type, ...] = (ServeFlags, ClusterFlags)
    of_kind = [
        {spec.name: arguments[spec.name] for spec in fields(k) if spec.name in arguments} for k in kinds
    ]
    rest = {name: value for name, value in arguments.items() if not any(name in taken for taken in of_kind)}
    flags, scale = ServeFlags(**of_kind[0]), ClusterFlags(**of_kind[1])
    return application(EngineArgs(**rest), flags, scale)


def run(args: EngineArgs, flags: ServeFlags, scale: ClusterFlags) -> None:
    """Serve until SIGINT or SIGTERM. Raises CheckpointError, ValueError; SystemExit: no replica starts."""
    check(args, flags)
    flags = replace(flags, api_key=flags.key())
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()
    before = {number: signal.getsignal(number) for number in SIGNALS}
    _listen_to(signals)
    # Ray logs all it does into /tmp/ray/session_latest/logs; here only what went wrong is wanted.
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        joined = join()
        if joined and serve.status().proxies:
            raise ValueError(
                "Ray Serve runs on this Ray cluster already, with an address of its own; end it (serve "
                "shutdown), or start another Ray with RAY_ADDRESS=local"
            )
        flags = replace(flags, port=free_port(flags.host, flags.port))
        if not joined:
            options = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
            ray.init(address="local", logging_level="ERROR", **options)
        _listen_to(signals)  # Ray has set a handler of its own
        _serve(args, flags, scale, joined, signals)
    finally:
        ray.shutdown()
        for number, handler in before.items():
            signal.signal(number, handler)


def _listen_to(signals: Signals) -> None:
    """Signals are put here, and not raised: Ray's own code does not bear an exception anywhere in it."""
    for number in SIGNALS:
        signal.signal(number, lambda number, _: signals.put(number))


def join() -> bool:
    """Connect to the Ray cluster that this machine is in, or RAY_ADDRESS names. Returns whether there is one.

    Raises ValueError: the one that RAY_ADDRESS names does not answer.
    """
    address = os.environ.get("RAY_ADDRESS")
    if address == "local":
        return False
    try:
        ray.init(address="auto", logging_level="ERROR")
    except ConnectionError:
        if address:
            message = f"RAY_ADDRESS={address}: no Ray cluster answers there, or it wants a token: "
            raise ValueError(f"{message}RAY_AUTH_MODE=token") from None
        return False
    return True


def free_port(host: str, port: int) -> int:
    """`port`, or a free one for 0: Ray's proxy, another process, opens it a moment later. Raises ValueError:
    it cannot be had.
    """
    sockets = listen(host, port)
    number = sockets[0].getsockname()[1]
    for listener in sockets:
        listener.close()
    return number


def _serve(args: EngineArgs, flags: ServeFlags, scale: ClusterFlags, joined: bool, signals: Signals) -> None:
    """Deploy, wait for signals, and take all down again."""
    app = application(args, flags, scale)
    if not joined:
        _refuse_too_many(app, scale)
    seconds = SHUTDOWN_SECONDS if flags.shutdown_timeout is None else flags.shutdown_timeout
    host = f"[{flags.host}]" if ":" in flags.host else flags.host
    name = (flags.served_model_name or [public_name(args.model)])[0]
    ready = (
        f"{scale.replicas} replicas of {name} at http://{host}:{flags.port}; Ctrl-C ends them, SIGHUP to "
        f"{os.getpid()} restarts one after another"
    )
    serve.start(http_options={"host": flags.host, "port": flags.port}, logging_config=QUIET)
    try:
        _deploy(app)
        is_ready = has_served = False
        while True:
            if not is_ready and _is_running():
                is_ready = has_served = True
                print(ready, file=sys.stderr, flush=True)
            try:
                number = signals.get(timeout=None if is_ready else POLL_SECONDS)
            except queue.Empty:
                continue
            if number != signal.SIGHUP:
                break
            _deploy(app)
            is_ready = False
        if has_served:
            _drain(seconds, signals)
    finally:
        serve.delete(NAME)  # returns when each replica has ended in order
        if joined:
            serve.shutdown()


def _refuse_too_many(app: Any, scale: ClusterFlags) -> None:
    """Ray would wait for machines, and none will come. Raises ValueError."""
    wanted = app._bound_deployment.ray_actor_options
    replicas = scale.max_replicas or scale.replicas
    for resource, option in (("CPU", "num_cpus"), ("GPU", "num_gpus")):
        each, there = wanted.get(option) or 0, ray.cluster_resources().get(resource, 0)
        if each * replicas > there:
            hint = "; try --num-cpus with less" if resource == "CPU" else ""
            raise ValueError(
                f"{replicas} replicas with {each:g} {resource} each: this machine has {there:g}{hint}"
            )


def _deploy(app: Any) -> None:
    """Start the replicas; or replace those of an earlier call, one after another. Does not wait for them."""
    is_first = NAME not in serve.status().applications
    serve.run_many(
        [serve.RunTarget(app, NAME, "/", logging_config=QUIET)], wait_for_applications_running=False
    )
    while not is_first and _is_running():  # still by the old ones
        time.sleep(POLL_SECONDS)


def _is_running() -> bool:
    """Whether all replicas are there. Raises SystemExit: they cannot be started."""
    status = serve.status().applications.get(NAME)
    if status and status.status == "DEPLOY_FAILED":
        messages = [deployment.message for deployment in status.deployments.values()]
        sys.exit(f"ruvon cluster: no replica starts: {(messages or [status.message])[0]}")
    return status is not None and status.status == "RUNNING"


def _drain(seconds: float, signals: Signals) -> None:
    """The end of `ruvon serve`, for all replicas: new requests are refused, those under way have `seconds`,
    or until a second signal; then they end with what they have.
    """
    handle = serve.get_app_handle(NAME)

    def ask(method: str, *arguments: float) -> list[Any]:
        """Every replica's answer; none where there is no replica to ask."""
        try:
            response = handle.broadcast(method, *arguments)
            return response.results(timeout_s=ANSWER_SECONDS, return_exceptions=True)
        except (TimeoutError, RayServeException):
            return []

    ask("begin_shutdown", seconds)
    deadline = time.monotonic() + seconds
    while False in ask("is_idle") and signals.empty() and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    ask("end_all")
