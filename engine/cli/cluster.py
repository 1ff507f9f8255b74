"""What `ruvon cluster` serves: the app of `ruvon serve` in several processes, for Ray Serve. Extension A.

A request's way: Ray's proxy (one on each machine that has a replica) reads the request. The proxy's router
chooses a replica. The replica's app (replica.py) answers through Ray, and each chunk of a stream is passed on
at once. cluster_run.py serves the application from the command line.

Promises that Ray replaces a replica whose process has died or whose engine has ended or hangs. Needs Ray,
which the extra `cluster` installs. many_devices.py has the flags.
"""

import os
from dataclasses import fields
from typing import Any

import ray
from ray import serve

from engine.cli.many_devices import ClusterFlags
from engine.cli.replica import Replica
from engine.cli.serve_flags import ServeFlags
from engine.models.config import ModelConfig
from engine.server.limits import MAX_REQUESTS, SHUTDOWN_SECONDS
from engine.server.shutdown import LAST_EVENT_SECONDS
from engine.telemetry.cost_accounting import CostAccounting
from engine.wiring.defaults import CPU_SEQS, GPU_SEQS
from engine.wiring.engine_args import EngineArgs

NAME = "ruvon"  # of the application and its deployment
HEALTH_CHECK_SECONDS = 1  # between two health checks; Ray replaces a replica that has failed three
HEALTH_CHECK_TIMEOUT = 10  # in seconds: a health check without an answer has failed
ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"  # by the header x-session-id


def application(args: EngineArgs, flags: ServeFlags, cluster_flags: ClusterFlags) -> Any:
    """The application that Ray Serve runs. Ray must have been started, because the share of a replica depends
    on the machines of Ray's cluster.

    Raises CheckpointError or ValueError as `check_options` does.
    """
    check_options(args, flags)
    has_gpu = _uses_gpu(args)
    deployment = serve.deployment(
        serve.ingress()(Replica),
        name=NAME,
        ray_actor_options=_resources(args, cluster_flags, has_gpu),
        # One more than the app admits (`RequestLimit`): the app refuses that one with an error of OpenAI's.
        # Ray would let it wait, without a word.
        max_ongoing_requests=MAX_REQUESTS + 1,
        graceful_shutdown_timeout_s=shutdown_seconds(flags) + LAST_EVENT_SECONDS,
        health_check_period_s=HEALTH_CHECK_SECONDS,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT,
        max_constructor_retry_count=1,  # a model that cannot be loaded once cannot be loaded the next time
        **_replica_settings(args, cluster_flags, has_gpu),
    )
    return deployment.bind(args, flags, os.getcwd())


def build(arguments: dict[str, Any]) -> Any:
    """The application for a Serve config file, such as a RayService's. The file names this function as
    `import_path: engine.cli.cluster:build`. Its `args` are the flags of `ruvon cluster`, with underscores.

    Raises what `application` raises, and TypeError for an unknown flag.
    """
    engine_options = dict(arguments)
    flags = ServeFlags(**_pop_fields(engine_options, ServeFlags))
    cluster_flags = ClusterFlags(**_pop_fields(engine_options, ClusterFlags))
    return application(EngineArgs(**engine_options), flags, cluster_flags)


def check_options(args: EngineArgs, flags: ServeFlags) -> None:
    """Check what can be checked before a process is started. Raises CheckpointError or ValueError for options
    that no replica could meet.
    """
    if flags.lora_dir:
        raise ValueError(
            "--lora-dir: an adapter that a client loads would be in one replica only; name adapters with "
            "--lora-modules"
        )
    if str(args.device).startswith("cuda:"):
        raise ValueError(f"device={str(args.device)!r}: Ray chooses each replica's GPUs; cuda is accepted")
    # The results are not used: these calls raise an error for an option that no replica could meet.
    flags.key()
    CostAccounting.parse(flags.price_per_hour, flags.api_price, None, flags.cost_weights)
    ModelConfig.from_pretrained(args.model, args.model_impl)


def shutdown_seconds(flags: ServeFlags) -> float:
    """How many seconds the answers under way have after Ctrl-C or SIGTERM."""
    return SHUTDOWN_SECONDS if flags.shutdown_timeout is None else flags.shutdown_timeout


def share_of_cores(cores: list[int], replicas: int) -> int:
    """The largest number of cores per replica with which all replicas fit on the machines; at least 1.
    `cores` has each machine's number of cores.
    """
    for share in range(max(cores), 1, -1):
        if sum(machine_cores // share for machine_cores in cores) >= replicas:
            return share
    return 1


def _uses_gpu(args: EngineArgs) -> bool:
    """Whether replicas run on GPUs."""
    return str(args.device) != "cpu" and ray.cluster_resources().get("GPU", 0) > 0


def _resources(args: EngineArgs, cluster_flags: ClusterFlags, has_gpu: bool) -> dict[str, float]:
    """What one replica takes, as Ray's options."""
    if has_gpu:
        return {"num_cpus": cluster_flags.num_cpus or 1, "num_gpus": args.tensor_parallel_size}
    num_cpus = cluster_flags.num_cpus
    if num_cpus is None:
        cores = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
        num_cpus = share_of_cores(cores, cluster_flags.max_replicas or cluster_flags.replicas)
    return {"num_cpus": num_cpus, "num_gpus": 0}


def _replica_settings(args: EngineArgs, cluster_flags: ClusterFlags, has_gpu: bool) -> dict[str, Any]:
    """How many replicas there are, and which of them gets a request, as Ray's options."""
    settings: dict[str, Any] = {}
    if cluster_flags.max_replicas is None:
        settings["num_replicas"] = cluster_flags.replicas
    else:
        max_num_seqs = args.max_num_seqs or (GPU_SEQS if has_gpu else CPU_SEQS)
        settings["autoscaling_config"] = {
            "min_replicas": cluster_flags.min_replicas or 1,
            "initial_replicas": cluster_flags.replicas,
            "max_replicas": cluster_flags.max_replicas,
            "target_ongoing_requests": cluster_flags.target_ongoing_requests or max_num_seqs,
        }
    if cluster_flags.sticky_sessions:
        settings["request_router_config"] = {"request_router_class": ROUTER}
    return settings


def _pop_fields(options: dict[str, Any], record: type) -> dict[str, Any]:
    """Remove the fields of the dataclass `record` from `options`, and return those that were there."""
    names = [spec.name for spec in fields(record)]
    return {name: options.pop(name) for name in names if name in options}
