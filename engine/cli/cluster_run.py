"""`ruvon cluster`: serves the application of cluster.py until a signal. Extension A.

Promises that on Ctrl-C and SIGTERM new requests are refused, requests under way end as those of `ruvon serve`
do, and no process of Ray is left that was started here. Needs Ray, which the extra `cluster` installs.
"""

import logging
import os
import queue
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.serve.exceptions import RayServeException

from engine.cli.cluster import NAME, application, check_options, shutdown_seconds
from engine.cli.many_devices import ClusterFlags
from engine.cli.replica import ANSWER_SECONDS
from engine.cli.serve import listen
from engine.cli.serve_flags import ServeFlags
from engine.wiring.engine_args import EngineArgs
from engine.wiring.loading import public_name

OBJECT_STORE_BYTES = 2**27  # of shared memory; answers need hardly any, and Ray's default is 30% of it all
QUIET = {"log_level": "WARNING", "enable_access_log": False}  # by default, Ray logs a line for each request
POLL_SECONDS = 0.2  # between two looks at whatever this command waits for
REPLACE_SECONDS = 10  # how long Ray may take to begin to replace replicas
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SignalQueue = queue.SimpleQueue[int]  # numbers of the signals that have come and are not handled yet


def run(args: EngineArgs, flags: ServeFlags, cluster_flags: ClusterFlags) -> None:
    """Serve until SIGINT or SIGTERM. Raises CheckpointError or ValueError for wrong options, SystemExit if no
    replica can start.
    """
    check_options(args, flags)
    flags = replace(flags, api_key=flags.key())
    signals: SignalQueue = queue.SimpleQueue()
    previous_handlers = {number: signal.getsignal(number) for number in SIGNALS}
    _put_signals_into(signals)
    # All that Ray logs is in /tmp/ray/session_latest/logs. The terminal gets only warnings and errors.
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        joined = join_cluster()
        if joined and serve.status().proxies:
            raise ValueError(
                "Ray Serve runs on this Ray cluster already, with an address of its own; end it (serve "
                "shutdown), or start another Ray with RAY_ADDRESS=local"
            )
        flags = replace(flags, port=checked_port(flags.host, flags.port))
        if not joined:
            options = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
            ray.init(address="local", logging_level="ERROR", **options)
        _put_signals_into(signals)  # again, because `ray.init` has set a handler of its own
        _serve(args, flags, cluster_flags, joined, signals)
    finally:
        ray.shutdown()
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def _put_signals_into(signals: SignalQueue) -> None:
    """From now on, put each signal of SIGNALS into the queue. A handler that raises, as Python's default for
    Ctrl-C does, could interrupt Ray's code anywhere.
    """
    for number in SIGNALS:
        signal.signal(number, lambda number, _: signals.put(number))


def join_cluster() -> bool:
    """Connect to the Ray cluster that this machine is in, or that RAY_ADDRESS names. Returns whether there is
    such a cluster.

    Raises ValueError if the cluster that RAY_ADDRESS names does not answer.
    """
    address = os.environ.get("RAY_ADDRESS")
    if address == "local":
        return False
    try:
        ray.init(address="auto", logging_level="ERROR")
    except ConnectionError:
        if address:
            raise ValueError(
                f"RAY_ADDRESS={address}: no Ray cluster answers there, or it wants a token: "
                "RAY_AUTH_MODE=token"
            ) from None
        return False
    return True


def checked_port(host: str, port: int) -> int:
    """`port`, or a free one for port 0. Checks that the port is free, and leaves it for Ray's proxy, another
    process, to open. Raises ValueError if the system refuses the host or the port.
    """
    sockets = listen(host, port)
    number = sockets[0].getsockname()[1]
    for listener in sockets:
        listener.close()
    return number


def _serve(
    args: EngineArgs, flags: ServeFlags, cluster_flags: ClusterFlags, joined: bool, signals: SignalQueue
) -> None:
    """Start the replicas, handle signals until one of them ends the command, and stop the replicas.

    `joined`: whether Ray's cluster was there before this command.
    """
    app = application(args, flags, cluster_flags)
    if not joined:
        _refuse_too_many(app, cluster_flags)
    host = f"[{flags.host}]" if ":" in flags.host else flags.host
    name = (flags.served_model_name or [public_name(args.model)])[0]
    ready_message = (
        f"{cluster_flags.replicas} replicas of {name} at http://{host}:{flags.port}; Ctrl-C ends them, "
        f"SIGHUP to {os.getpid()} restarts one after another"
    )
    serve.start(http_options={"host": flags.host, "port": flags.port}, logging_config=QUIET)
    try:
        _deploy(app)
        if _wait_for_end(app, ready_message, signals):
            _drain(shutdown_seconds(flags), signals)
    finally:
        serve.delete(NAME)  # returns when each replica has ended in order
        if joined:  # otherwise `run` ends all of Ray
            serve.shutdown()


def _wait_for_end(app: Any, ready_message: str, signals: SignalQueue) -> bool:
    """Wait for a signal that ends the command, and restart the replicas at each SIGHUP before it. Prints the
    message each time all replicas have started. Returns whether that has happened.
    """
    is_ready = has_served = False
    while True:
        if not is_ready and _is_running():
            is_ready = has_served = True
            print(ready_message, file=sys.stderr, flush=True)
        try:
            number = signals.get(timeout=None if is_ready else POLL_SECONDS)
        except queue.Empty:
            continue
        if number != signal.SIGHUP:
            return has_served
        _deploy(app)
        is_ready = False


def _refuse_too_many(app: Any, cluster_flags: ClusterFlags) -> None:
    """Raise ValueError if the replicas need more than this machine has. Ray would wait for further machines,
    which do not come, because this Ray was started here.
    """
    options = app._bound_deployment.ray_actor_options  # Ray has no public name for them
    replicas = cluster_flags.max_replicas or cluster_flags.replicas
    for resource, option in (("CPU", "num_cpus"), ("GPU", "num_gpus")):
        per_replica = options.get(option) or 0
        available = ray.cluster_resources().get(resource, 0)
        if per_replica * replicas > available:
            hint = "; try --num-cpus with less" if resource == "CPU" else ""
            raise ValueError(
                f"{replicas} replicas with {per_replica:g} {resource} each: this machine has "
                f"{available:g}{hint}"
            )


def _deploy(app: Any) -> None:
    """Start the replicas, or replace those of an earlier call one after another. Does not wait until the new
    replicas run.
    """
    is_first = NAME not in serve.status().applications
    target = serve.RunTarget(app, NAME, "/", logging_config=QUIET)
    serve.run_many([target], wait_for_applications_running=False)
    if is_first:
        return
    # Wait until Ray has begun to replace the old replicas, which run until then. Ray may also begin and end
    # between two looks, hence the bound.
    deadline = time.monotonic() + REPLACE_SECONDS
    while _is_running() and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def _is_running() -> bool:
    """Whether all replicas run. Raises SystemExit if they cannot be started."""
    status = serve.status().applications.get(NAME)
    if status and status.status == "DEPLOY_FAILED":
        messages = [deployment.message for deployment in status.deployments.values()]
        message = messages[0] if messages else status.message
        sys.exit(f"ruvon cluster: no replica starts: {message}")
    return status is not None and status.status == "RUNNING"


def _drain(seconds: float, signals: SignalQueue) -> None:
    """Shut all replicas down as `ruvon serve` shuts down. New requests are refused. Requests under way have
    `seconds`, or until a second signal, and then end with the tokens they have.
    """
    handle = serve.get_app_handle(NAME)
    with suppress(TimeoutError):
        _ask_all(handle, "begin_shutdown", seconds)
    deadline = time.monotonic() + seconds
    while _may_be_at_work(handle) and signals.empty() and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    with suppress(TimeoutError):
        _ask_all(handle, "end_all")


def _may_be_at_work(handle: Any) -> bool:
    """Whether a replica has a request under way, or does not answer in time and so may have one. `handle` is
    Ray's, of the application.
    """
    try:
        return False in _ask_all(handle, "is_idle")
    except TimeoutError:
        return True


def _ask_all(handle: Any, method: str, *arguments: float) -> list[Any]:
    """Each replica's answer to a call of `method`, or the exception that the call has raised; [] if no
    replica runs any more.

    Raises TimeoutError if a replica does not answer in ANSWER_SECONDS.
    """
    try:
        response = handle.broadcast(method, *arguments)
        return response.results(timeout_s=ANSWER_SECONDS, return_exceptions=True)
    except RayServeException:
        return []
