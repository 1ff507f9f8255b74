"""What `ruvon cluster` says and works out before Ray is started."""

import asyncio
import queue
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest
import typer
import yaml
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from typer.testing import CliRunner

from engine.cli.main import app as ruvon
from engine.cli.many_devices import ClusterFlags, cluster
from engine.cli.serve_flags import NEUTRAL_FLAGS, ServeFlags
from engine.server.limits import MAX_REQUESTS
from engine.wiring.engine_args import EngineArgs
from engine.wiring.neutral_options import NEUTRAL

ROOT = Path(__file__).parents[2]
MANIFEST = ROOT / "examples" / "kubernetes" / "rayservice.yaml"


def test_cluster_has_every_flag_of_serve():
    names = {parameter.name for parameter in typer.main.get_params_from_function(cluster).values()}
    own = {spec.name for record in (EngineArgs, ServeFlags, ClusterFlags) for spec in fields(record)}
    assert own | {"model_tag"} | set(NEUTRAL) | set(NEUTRAL_FLAGS) == names


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"min_replicas": 1}, "min_replicas=1 needs max_replicas"),
        ({"target_ongoing_requests": 3.0}, "needs max_replicas"),
        ({"replicas": 4, "max_replicas": 3}, "replicas=4: from min_replicas=1 to max_replicas=3"),
        ({"min_replicas": 3, "max_replicas": 4}, "replicas=2: from min_replicas=3"),
        ({"num_cpus": 0.0}, "num_cpus=0.0: a number above 0"),
        ({"replicas": 0}, "replicas=0: a whole number from 1"),
        ({"min_replicas": 0, "max_replicas": 4}, "min_replicas=0: a whole number from 1"),
    ],
)
def test_flags_that_do_not_fit_are_named(settings, says):
    with pytest.raises(ValueError, match=says):
        ClusterFlags(**settings)


@pytest.fixture
def parts():
    """The module that imports Ray, where Ray is."""
    pytest.importorskip("ray", reason="needs Ray: pip install 'ruvon[cluster]'")
    import engine.cli.cluster

    return engine.cli.cluster


@pytest.fixture
def replica(parts):
    """The module of one replica."""
    import engine.cli.replica

    return engine.cli.replica


@pytest.mark.parametrize(
    ("cores", "replicas", "share"),
    [
        ([2], 2, 1),
        ([2], 1, 2),
        ([8], 3, 2),
        ([16, 16], 2, 16),
        ([8, 8, 8], 2, 8),
        ([8, 8, 8], 4, 4),
        ([1], 5, 1),
    ],
)
def test_all_replicas_find_room_and_take_what_there_is(parts, cores, replicas, share):
    """Three machines of 8 cores and 4 replicas: 6 each would be 24 cores, and only three would fit."""
    assert parts.share_of_cores(cores, replicas) == share


@pytest.fixture
def machines(parts, monkeypatch):
    """A Ray cluster of two machines, without Ray."""
    resources = {"CPU": 8.0, "GPU": 2.0}
    monkeypatch.setattr(parts.ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": 4.0}}] * 2)
    monkeypatch.setattr(parts.ray, "cluster_resources", lambda: resources)
    return resources


def options(app) -> dict:
    return app._bound_deployment.ray_actor_options


def test_what_a_replica_takes(parts, machines):
    from engine.cli import cluster_run

    app = parts.application(EngineArgs(), ServeFlags(), ClusterFlags())
    assert (options(app)["num_cpus"], options(app)["num_gpus"]) == (1, 1)
    app = parts.application(EngineArgs(device="cpu"), ServeFlags(), ClusterFlags())
    assert (options(app)["num_cpus"], options(app)["num_gpus"]) == (4, 0)
    machines["GPU"] = 0.0
    app = parts.application(EngineArgs(), ServeFlags(), ClusterFlags(replicas=8))
    assert (options(app)["num_cpus"], options(app)["num_gpus"]) == (1, 0)
    with pytest.raises(ValueError, match=r"9 replicas with 1 CPU each: this machine has 8; try --num-cpus"):
        cluster_run._refuse_too_many(
            parts.application(EngineArgs(), ServeFlags(), ClusterFlags(replicas=9)), ClusterFlags(replicas=9)
        )


def test_autoscaling_is_rays_own(parts, machines):
    scale = ClusterFlags(replicas=2, max_replicas=4)
    config = parts.application(EngineArgs(max_num_seqs=8), ServeFlags(), scale)._bound_deployment
    autoscaling = config._deployment_config.autoscaling_config
    assert (autoscaling.min_replicas, autoscaling.initial_replicas, autoscaling.max_replicas) == (1, 2, 4)
    assert autoscaling.target_ongoing_requests == 8


def test_sessions_are_sticky_unless_that_is_refused(parts, machines):
    routers = [
        parts.application(EngineArgs(), ServeFlags(), ClusterFlags(sticky_sessions=sticky))
        ._bound_deployment._deployment_config.request_router_config.request_router_class.rpartition(".")[2]
        .rpartition(":")[2]
        for sticky in (True, False)
    ]
    assert routers == ["ConsistentHashRouter", "PowerOfTwoChoicesRequestRouter"]


@pytest.mark.parametrize(
    ("args", "flags", "says"),
    [
        ({"enable_lora": True}, {"lora_dir": Path("adapters")}, "in one replica only"),
        ({"device": "cuda:1"}, {}, "cuda is accepted"),
        ({}, {"api_key": " "}, "the API key is empty"),
        ({}, {"api_price": "1,2,3"}, "needs price_per_hour"),
    ],
)
def test_what_no_replica_could_do_is_refused(parts, args, flags, says):
    with pytest.raises(ValueError, match=says):
        parts.check_options(EngineArgs(**args), ServeFlags(**flags))


class Clock:
    """Seconds that pass only where somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def run(parts, monkeypatch):
    """The module of the command, with a clock of the test's."""
    from engine.cli import cluster_run

    monkeypatch.setattr(cluster_run, "time", Clock())
    return cluster_run


@pytest.mark.parametrize(
    ("answers", "asked", "says"),
    [
        ([[True, True]], 1, "all are idle"),
        ([[False, True], [True, True]], 2, "one was at work"),
        ([TimeoutError(), [False], [True]], 3, "who does not answer in time may be at work"),
        ([[RuntimeError("died"), True]], 1, "who has died has no request"),
    ],
)
def test_a_shutdown_waits_while_a_replica_may_be_at_work(run, monkeypatch, answers, asked, says):
    calls, left = [], iter(answers)

    def results(**options):
        answer = next(left) if calls[-1] == "is_idle" else []
        if isinstance(answer, TimeoutError):
            raise answer
        return answer

    def broadcast(method, *arguments):
        calls.append(method)
        return SimpleNamespace(results=results)

    monkeypatch.setattr(run.serve, "get_app_handle", lambda name: SimpleNamespace(broadcast=broadcast))
    run._drain(60, queue.SimpleQueue())
    assert calls == ["begin_shutdown", *["is_idle"] * asked, "end_all"], says


@pytest.mark.parametrize(("running", "waits"), [(3, True), (10**9, False)])
def test_replicas_that_ray_replaces_at_once_or_not_at_all_are_not_waited_for_without_end(
    run, monkeypatch, running, waits
):
    """Ray may replace them between two looks, so that they seem to run all the time."""
    looks = iter(range(10**9))
    monkeypatch.setattr(run, "_is_running", lambda: next(looks) < running)
    monkeypatch.setattr(run.serve, "status", lambda: SimpleNamespace(applications={run.NAME: None}))
    monkeypatch.setattr(run.serve, "run_many", lambda targets, **options: None)
    monkeypatch.setattr(run.serve, "RunTarget", lambda *arguments, **options: None)
    run._deploy(None)
    assert (run.time.now < run.REPLACE_SECONDS) == waits


def test_metrics_of_all_replicas_are_one_text(replica):
    def collected(tokens: int) -> list:
        registry = CollectorRegistry()
        Counter("vllm:tokens", "Tokens.", ["model_name", "engine"], registry=registry).labels("m", "0").inc(
            tokens
        )
        Gauge("memory", "Bytes.", registry=registry).set(10 * tokens)
        return list(registry.collect())

    text = generate_latest(replica.merged({1: collected(2), 0: collected(1)})).decode()
    assert text.count("# HELP vllm:tokens_total Tokens.") == 1
    assert (
        'vllm:tokens_total{engine="0",model_name="m"} 1.0\nvllm:tokens_total{engine="1",model_name="m"} 2.0'
        in text
    )
    assert 'memory{engine="0"} 10.0\nmemory{engine="1"} 20.0' in text
    assert "ruvon:replicas 2.0" in text


def test_two_replicas_do_not_write_into_one_file(replica):
    assert replica.path_of_replica("logs/costs.csv", "abc") == "logs/costs-abc.csv"
    assert replica.path_of_replica(None, "abc") is None


def asked(replica, monkeypatch, answers: list) -> dict:
    """What a replica makes of the answers of all replicas."""

    async def results_async(**options):
        return answers

    handle = SimpleNamespace(broadcast=lambda method: SimpleNamespace(results_async=results_async))
    this_replica = SimpleNamespace(deployment="d", app_name="a")
    monkeypatch.setattr(replica.serve, "get_replica_context", lambda: this_replica)
    monkeypatch.setattr(replica.serve, "get_deployment_handle", lambda *names: handle)
    return asyncio.run(replica.Replica.__new__(replica.Replica)._ask_all("metrics"))


def test_only_a_call_that_failed_in_a_living_replica_is_logged(replica, monkeypatch, caplog):
    from ray.exceptions import RayActorError

    assert asked(replica, monkeypatch, [RayActorError(), (1, "one")]) == {1: "one"}
    assert not caplog.records
    assert asked(replica, monkeypatch, [ZeroDivisionError("oh"), (1, "one")]) == {1: "one"}
    assert "metrics of a replica failed" in caplog.text
    assert "ZeroDivisionError: oh" in caplog.text


def test_without_any_answer_a_route_says_503(replica, monkeypatch):
    with pytest.raises(replica.RequestError, match="no replica has answered") as caught:
        asked(replica, monkeypatch, [])
    assert caught.value.status == 503


def test_a_replica_that_was_not_made_ends_without_an_error(replica):
    replica.Replica.__new__(replica.Replica).__del__()


# The fields of KubeRay's RayService that the manifest uses, and their kinds, by KubeRay's own types
# (ray-operator/apis/ray/v1): its whole schema is a megabyte, and is not here.
POD = {
    "type": "object",
    "required": ["spec"],
    "properties": {"spec": {"type": "object", "required": ["containers"]}},
    "additionalProperties": False,
}
PARAMS = {"type": "object", "additionalProperties": {"type": "string"}}
WORKERS = {
    "type": "object",
    "required": ["groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"],
    "properties": {
        "groupName": {"type": "string"},
        "replicas": {"type": "integer"},
        "minReplicas": {"type": "integer"},
        "maxReplicas": {"type": "integer"},
        "rayStartParams": PARAMS,
        "template": POD,
    },
    "additionalProperties": False,
}
HEAD = {
    "type": "object",
    "required": ["rayStartParams", "template"],
    "properties": {"rayStartParams": PARAMS, "template": POD},
    "additionalProperties": False,
}
RAY_SERVICE = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayService"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": {
            "type": "object",
            "required": ["serveConfigV2", "rayClusterConfig"],
            "properties": {
                "serveConfigV2": {"type": "string"},
                "rayClusterConfig": {
                    "type": "object",
                    "required": ["headGroupSpec"],
                    "properties": {
                        "rayVersion": {"type": "string"},
                        "headGroupSpec": HEAD,
                        "workerGroupSpecs": {"type": "array", "items": WORKERS},
                    },
                    "additionalProperties": False,
                },
            },
            "additionalProperties": False,
        },
    },
    "additionalProperties": False,
}


def test_the_manifest_has_the_fields_of_a_ray_service():
    manifest = yaml.safe_load(MANIFEST.read_text())
    jsonschema.validate(manifest, RAY_SERVICE)
    cluster = manifest["spec"]["rayClusterConfig"]
    pods = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    containers = [pod["template"]["spec"]["containers"][0] for pod in pods]
    assert len({container["image"] for container in containers}) == 1, "Ray wants one version everywhere"
    for container in containers:
        assert "serve" in {port["name"] for port in container["ports"]}
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert f"ray=={cluster['rayVersion']}" in pins


def test_the_manifests_serve_config_is_one_that_ray_accepts(parts, machines, monkeypatch):
    """By Ray's own schema; and its `args` are flags of ours, and fit the pods that the manifest asks for."""
    from ray.serve.schema import ServeDeploySchema

    spec = yaml.safe_load(MANIFEST.read_text())["spec"]
    config = ServeDeploySchema.model_validate(yaml.safe_load(spec["serveConfigV2"]))
    (application,) = config.applications
    module, name = application.import_path.split(":")
    assert (module, getattr(parts, name)) == (parts.__name__, parts.build)
    machines["GPU"] = 0.0
    monkeypatch.setattr(parts.ModelConfig, "from_pretrained", lambda *_: None)  # no download here
    app = parts.build(application.args)
    (workers,) = spec["rayClusterConfig"]["workerGroupSpecs"]
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert options(app)["num_cpus"] <= float(limits["cpu"])
    assert app._bound_deployment.num_replicas == workers["replicas"]
    with pytest.raises(TypeError, match="no_such_flag"):
        parts.build({"no_such_flag": 1})


def test_a_module_of_this_tree_that_is_missing_is_no_package_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "engine.cli.cluster_run", None)
    done = CliRunner().invoke(ruvon, ["cluster"])
    assert isinstance(done.exception, ModuleNotFoundError), done.output


def test_ray_passes_on_the_request_that_the_app_refuses(parts, machines):
    """Ray would let it wait, and the client would not know why."""
    app = parts.application(EngineArgs(), ServeFlags(), ClusterFlags())
    assert app._bound_deployment._deployment_config.max_ongoing_requests == MAX_REQUESTS + 1
