"""What an engine's options have watch it: a trace in a file, and spans for OpenTelemetry. Part 20's wiring.

`Watchers` is made before a model is loaded, so that a file that cannot be written, or a package that is not
installed, is refused at once.
"""

from typing import TYPE_CHECKING

from engine.cache.paged import PagedCache
from engine.machine.version import ruvon_version
from engine.requests.listeners import Listener
from engine.scheduling.continuous import ContinuousScheduler
from engine.telemetry.trace import Trace, open_trace
from engine.telemetry.trace_file import TraceFile
from engine.wiring.engine_args import EngineArgs

if TYPE_CHECKING:  # needs the extra `otel`
    from engine.telemetry.spans import RequestSpans


class Watchers:
    """The trace and the spans of one engine, where its options ask for them."""

    def __init__(self, args: EngineArgs) -> None:
        """Raises ValueError if an option cannot be met."""
        self._spans: RequestSpans | None = None
        self._file: TraceFile | None = None
        self._trace: Trace | None = None  # writes into `_file`; None until `listeners` is called
        try:
            if args.otlp_traces_endpoint is not None:
                self._spans = _open_spans(args.otlp_traces_endpoint)
            if args.trace is not None:
                self._file = open_trace(args.trace)
        except BaseException:
            self.close()
            raise

    def listeners(self, args: EngineArgs, scheduler: ContinuousScheduler) -> list[Listener]:
        """The listeners for the engine of this scheduler. Call this once."""
        listeners: list[Listener] = []
        if self._file is not None:
            cache = scheduler.cache
            # Without pages, a trace counts tokens: blocks of one.
            block_size = cache.block_size if isinstance(cache, PagedCache) else 1
            about = {"ruvon": ruvon_version(), "model": str(args.model), "seats": scheduler.max_num_seqs}
            # The budget is read anew in each step, because an elastic scheduler changes it.
            self._trace = Trace(
                self._file, cache, block_size, lambda: scheduler.max_num_batched_tokens, about
            )
            listeners.append(self._trace)
        if self._spans is not None:
            listeners.append(self._spans)
        return listeners

    def close(self) -> None:
        """Write and send what is left. A second call does nothing."""
        if self._trace is not None:
            self._trace.close()  # its file, too
        elif self._file is not None:
            self._file.close()
        if self._spans is not None:
            self._spans.close()
        self._trace = self._file = self._spans = None


def _open_spans(endpoint: str) -> "RequestSpans":
    """Spans that go to `endpoint`. Raises ValueError if it is no collector's address, or if the extra `otel`
    is not installed.
    """
    try:
        from engine.telemetry.spans import open_spans
    except ModuleNotFoundError as error:
        raise ValueError(
            f"otlp_traces_endpoint={endpoint!r}: {error.name} is not installed; pip install 'ruvon[otel]'"
        ) from None
    return open_spans(endpoint)
