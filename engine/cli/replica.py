"""A replica of `ruvon cluster`: one engine and its app, in a process that Ray starts. Extension A.

Promises that `check_health` fails when the engine has ended or hangs, so that Ray can replace the replica;
during a shutdown it always succeeds. A stream whose replica dies ends with an error, and is not resumed. A
replica knows nothing of the others, except that its routes /metrics and /dashboard/data ask all of them.

Needs Ray, which the extra `cluster` installs.
"""

import gc
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastapi import Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from ray import serve
from ray.exceptions import RayActorError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from engine.cli.serve_flags import ServeFlags
from engine.cli.serving import Service, allowed_hosts
from engine.machine.collector import NEW_OBJECTS
from engine.server.errors import RequestError
from engine.server.limits import SWITCH_SECONDS
from engine.server.telemetry_routes import METRICS_TYPE
from engine.telemetry.cost_accounting import CostAccounting
from engine.telemetry.history import DATA_PATH
from engine.wiring.engine_args import EngineArgs
from engine.wiring.loading import one_thread_if_small

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 5  # in which a replica must answer a call of another replica or of the command


class Replica:
    """One engine and its app. Ray makes one Replica in each of its processes for this application."""

    costs: CostAccounting | None = None  # `__del__` reads it, also where `__init__` has failed before it

    def __init__(self, args: EngineArgs, flags: ServeFlags, folder: str) -> None:
        """Load the model and make the app. `folder` is the working folder of the command, to which relative
        paths refer. Raises CheckpointError or ValueError.
        """
        if Path(folder).is_dir():  # another machine may not have it
            os.chdir(folder)
        name = serve.get_replica_context().replica_tag
        args = replace(
            args, record=path_of_replica(args.record, name), trace=path_of_replica(args.trace, name)
        )
        log = path_of_replica(flags.cost_log, name)

        one_thread_if_small(args.model, args.model_impl)
        self.costs = CostAccounting.parse(flags.price_per_hour, flags.api_price, log, flags.cost_weights)
        self.service = Service(args, flags)
        hosts = allowed_hosts(flags.host, flags.allowed_host or ())
        app = self.service.app(
            hosts,
            flags.key(),
            allow_priority=flags.allow_priority,
            costs=self.costs,
            root_path=flags.root_path,
        )
        # The first route that matches answers: these two come before the app's own, which show one engine.
        # The app's middleware, such as the limits, applies to them as well.
        app.router.routes.insert(0, Route("/metrics", self.scrape))
        app.router.routes.insert(0, Route(DATA_PATH, self.data))
        self._app = app
        self._is_closing = False

        # The same settings of the process as in `serve` of engine/server/run.py, which has the reasons.
        gc.collect()
        gc.freeze()
        gc.set_threshold(NEW_OBJECTS)
        sys.setswitchinterval(SWITCH_SECONDS)

    def __serve_build_asgi_app__(self) -> Starlette:
        """The app that Ray serves; the name is Ray's. Ray also opens the app's lifespan, which starts the
        engine's thread.
        """
        return self._app

    def __del__(self) -> None:
        """Write the end of the cost log. Ray calls this when the replica has no request left and its app has
        ended.
        """
        if self.costs:
            self.costs.end()

    async def check_health(self) -> None:
        """Ray's health check. Raises RuntimeError if the engine has ended or hangs, but not during a
        shutdown: the server refuses requests then, and Ray would take the replica for a broken one.
        """
        try:
            if not self._is_closing:
                self.service.backend.health()
        except RequestError as error:
            raise RuntimeError(str(error)) from None

    # Calls to all replicas at once (`broadcast`), from one of them or from the command.

    async def metrics(self) -> tuple[int, list[Metric]]:
        """(this replica's rank, the metrics of its engine and its server)."""
        return self.rank(), list(self.service.metrics.registry.collect())

    async def snapshot(self) -> tuple[int, dict]:
        """(this replica's rank, the data of its dashboard)."""
        return self.rank(), self.service.metrics.snapshot()

    async def begin_shutdown(self, seconds: float) -> None:
        """Refuse new requests from now on; the server ends in `seconds`."""
        self._is_closing = True
        self.service.backend.begin_shutdown(seconds)

    async def is_idle(self) -> bool:
        """Whether no request is under way."""
        return self.service.backend.idle

    async def end_all(self) -> None:
        """End the requests under way with the tokens they have."""
        self.service.backend.end_all()

    def rank(self) -> int:
        """This replica's number, from 0. It may change when others come and go."""
        return serve.get_replica_context().rank.rank

    async def _ask_all(self, method: str) -> dict[int, Any]:
        """rank -> the replica's answer to a call of `method`. A replica that has just died is left out, and
        so is one whose call has failed, which is logged.

        Raises RequestError 503 if a replica does not answer in ANSWER_SECONDS, or if none is left.
        """
        this_replica = serve.get_replica_context()
        handle = serve.get_deployment_handle(this_replica.deployment, this_replica.app_name)
        response = handle.broadcast(method)
        try:
            answers = await response.results_async(timeout_s=ANSWER_SECONDS, return_exceptions=True)
        except TimeoutError:
            raise RequestError(503, f"a replica has not answered in {ANSWER_SECONDS} s") from None
        by_rank = {}
        for answer in answers:
            if not isinstance(answer, BaseException):
                rank, value = answer
                by_rank[rank] = value
            elif not isinstance(answer, RayActorError):  # which would say that the replica has died
                logger.error("%s of a replica failed", method, exc_info=answer)
        if not by_rank:
            raise RequestError(503, "no replica has answered")
        return by_rank

    async def scrape(self, request: Request) -> Response:
        """The route /metrics: the metrics of all replicas."""
        text = generate_latest(merged(await self._ask_all("metrics")))
        return Response(text, media_type=METRICS_TYPE)

    async def data(self, request: Request) -> Response:
        """The dashboard's data: always the first replica's, so that the page does not jump between them."""
        snapshots = await self._ask_all("snapshot")
        first_rank = min(snapshots)
        snapshot = snapshots[first_rank]
        name = f"{snapshot['model_name']}, replica {first_rank} of {len(snapshots)}"
        return JSONResponse(snapshot | {"model_name": name}, headers={"Cache-Control": "no-store"})


def path_of_replica(path: str | Path | None, replica: str) -> str | None:
    """The path with a replica's name added, such as costs-abc.csv for costs.csv, because two replicas must
    not write to one file. None for None.
    """
    if path is None:
        return None
    stem = Path(path).stem
    return str(Path(path).with_stem(f"{stem}-{replica}"))


class _Collector:
    """A collector, as prometheus_client's registry needs one, of metrics that are collected already."""

    def __init__(self, metrics: list[Metric]) -> None:
        """`metrics` are what `collect` returns."""
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        """The metrics, for the registry."""
        return self._metrics


def merged(metrics_by_rank: Mapping[int, list[Metric]]) -> CollectorRegistry:
    """A registry with each metric once, which has the samples of all replicas. Their label `engine` is the
    replica's rank, as in vLLM.
    """
    merged_metrics: dict[str, Metric] = {}
    for rank, metrics in sorted(metrics_by_rank.items()):
        for metric in metrics:
            empty = Metric(metric.name, metric.documentation, metric.type)
            merged_metric = merged_metrics.setdefault(metric.name, empty)
            for sample in metric.samples:
                labels = sample.labels | {"engine": str(rank)}
                merged_metric.add_sample(sample.name, labels, sample.value, sample.timestamp, sample.exemplar)
    num_replicas = GaugeMetricFamily(
        "ruvon:replicas", "Replicas that answered this scrape.", len(metrics_by_rank)
    )
    registry = CollectorRegistry()
    registry.register(_Collector([*merged_metrics.values(), num_replicas]))
    return registry
