"""A replica of `ruvon cluster`: one engine and its app, in a process that Ray starts. Extension A.

A replica knows nothing of the others, but that /metrics asks them all. Promises that `check_health` says when
its engine has ended or hangs, so that Ray can replace it. A stream whose replica dies ends with an error, and
is not resumed.

Imports Ray, as only cluster.py does beside it: extra `cluster`.
"""

import gc
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

ANSWER_SECONDS = 5  # for a replica to answer a question of ours


class Replica:
    """One engine and its app: what Ray runs in a process of its own, R times."""

    def __init__(self, args: EngineArgs, flags: ServeFlags, folder: str) -> None:
        """`folder`: the command's, to which relative paths belong. Raises CheckpointError or ValueError."""
        if Path(folder).is_dir():  # another machine may not have it
            os.chdir(folder)
        name = serve.get_replica_context().replica_tag
        args = replace(args, record=own_file(args.record, name), trace=own_file(args.trace, name))
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
