"""Counts HTTP requests for Prometheus, under the names that vLLM's server has. Part 20.

The names are those of prometheus-fastapi-instrumentator, which vLLM uses: `http_requests_total`,
`http_request_duration_seconds` and `http_request_duration_highr_seconds`. A handler is a route's template,
such as /v1/models/{name}, and never a client's path, so the number of series is bounded by that of routes.
"""

import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.server.app import AppExtension
from engine.server.backend import Backend
from engine.telemetry.histogram import Histogram

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")
OTHER = "OTHER"  # any method that is not in METHODS
NO_HANDLER = "none"  # for a path that no route has
# The upper bounds of the buckets, in seconds: by handler and method, and of all requests together.
BUCKETS = (0.1, 0.5, 1)
FINE_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10, 30, 60,
)  # fmt: skip


class HttpMetrics:
    """A collector of what `CountRequests` counts. Durations are in seconds, from a request's head to the end
    of its answer.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # between the server's event loop and readers
        self._requests: Counter[tuple[str, str, str]] = Counter()  # by handler, method, status
        self._by_route: dict[tuple[str, str], Histogram] = {}  # durations by handler and method
        self._all = Histogram(FINE_BUCKETS)  # durations of all requests together

    def observe(self, handler: str, method: str, status: str, seconds: float) -> None:
        """Count a request that is over. `handler` is a route's template or NO_HANDLER, `method` any HTTP
        method, `status` the class of the answer's status, such as "2xx", and `seconds` the duration.
        """
        method = method if method in METHODS else OTHER
        with self._lock:
            self._requests[handler, method, status] += 1
            self._by_route.setdefault((handler, method), Histogram(BUCKETS)).observe(seconds)
            self._all.observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """The metrics, for the registry."""
        counter = CounterMetricFamily(
            "http_requests",
            "HTTP requests by route, method and class of status.",
            labels=("handler", "method", "status"),
        )
        by_route = HistogramMetricFamily(
            "http_request_duration_seconds",
            "Seconds to the end of the answer, by route and method.",
            labels=("handler", "method"),
        )
        all_requests = HistogramMetricFamily(
            "http_request_duration_highr_seconds", "Seconds to the end of the answer, in finer buckets."
        )
        with self._lock:
            for labels, count in self._requests.items():
                counter.add_metric(labels, count)
            for (handler, method), histogram in self._by_route.items():
                by_route.add_metric((handler, method), histogram.prometheus_buckets(), histogram.sum)
            all_requests.add_metric((), self._all.prometheus_buckets(), self._all.sum)
        yield from (counter, by_route, all_requests)


def http_metrics(registry: CollectorRegistry, uncounted: Collection[str]) -> AppExtension:
    """An extension of `create_app` that counts requests, also those that another middleware refuses. Requests
    for the paths `uncounted`, such as a scraper's, are not counted.
    """
    metrics = HttpMetrics()
    registry.register(metrics)

    def extend(app: FastAPI, _: Backend) -> None:
        app.add_middleware(CountRequests, metrics=metrics, server=app, uncounted=frozenset(uncounted))

    return extend


class CountRequests:
    """Middleware that counts each HTTP request in `metrics` once the request is over."""

    def __init__(
        self, app: ASGIApp, metrics: HttpMetrics, server: FastAPI, uncounted: Collection[str]
    ) -> None:
        """`app`: the next middleware. `server`: the whole app, which has the routes, also those that are
        added later. `uncounted`: paths whose requests are not counted.
        """
        self.app, self.metrics, self.server, self.uncounted = app, metrics, server, uncounted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self.uncounted:
            return await self.app(scope, receive, send)
        start = time.perf_counter()
        status = 500  # the answer's status, if the route raises before it answers

        async def send_noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, send_noting_status)
        finally:
            seconds = time.perf_counter() - start
            self.metrics.observe(self._handler(scope), scope["method"], f"{status // 100}xx", seconds)

    def _handler(self, scope: Scope) -> str:
        """The template of the route for this request, such as /v1/models/{name}, or NO_HANDLER. A route that
        takes the path, but not the method, counts if no other route takes both.
        """
        handler = NO_HANDLER
        for route in self.server.routes:
            if not isinstance(route, Route):
                continue
            match, _ = route.matches(scope)
            if match is Match.FULL:
                return route.path
            if match is Match.PARTIAL and handler == NO_HANDLER:  # the path, but not the method
                handler = route.path
        return handler
