"""Builds what `ruvon serve` serves: an engine, admission control, and the HTTP app. Part 20's wiring.

This module needs the extra `server`; engine/cli/serve.py prints a message if the extra is not installed.
"""

import hashlib
import logging
import reprlib
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector

from engine.cache.paged import PagedCache
from engine.cache.slots import SlotCache
from engine.cli.serve_flags import ServeFlags
from engine.core.engine_thread import EngineThread
from engine.decoding.chat_template import ChatTemplate
from engine.lora.manager import AdapterManager
from engine.machine.version import ruvon_version
from engine.models.checkpoint import read_text
from engine.scheduling.elastic import ElasticScheduler
from engine.server.adapters import AdapterEngineThread, adapter_routes, named_folders
from engine.server.admission import Admission
from engine.server.admission_metrics import AdmissionMetrics
from engine.server.app import AppExtension, create_app
from engine.server.capacity import Capacity, queue_limits
from engine.server.chat import Chat, chat_routes
from engine.server.chat_page import OPEN_PATHS as CHAT_PATHS
from engine.server.chat_page import chat_page
from engine.server.deadline import add_deadlines
from engine.server.extensions import optional_module
from engine.server.generate import generate_route
from engine.server.http_metrics import http_metrics
from engine.server.limits import MAX_NAME_CHARACTERS, MAX_REQUESTS
from engine.server.live_routes import EVENTS_PATH, live_routes
from engine.server.live_routes import OPEN_PATHS as LIVE_PATHS
from engine.server.protocol import Completions
from engine.server.responses_route import responses_route
from engine.server.run import max_connections
from engine.server.scored import ScoredCompletions
from engine.server.telemetry_routes import OPEN_PATHS as TELEMETRY_PATHS
from engine.server.telemetry_routes import telemetry_routes
from engine.server.tokenization import tokenization_routes
from engine.server.trace_context import TracedBackend, add_trace_context
from engine.server.usage_cost import usage_cost
from engine.server.watch import StepWatch
from engine.speculation.capability import Speculation
from engine.telemetry.cost_accounting import CostAccounting
from engine.telemetry.info import AdapterInfo, CacheInfo
from engine.telemetry.live_view import LiveView
from engine.telemetry.metrics import EngineMetrics
from engine.telemetry.speculation import SpeculationMetrics
from engine.telemetry.stat_log import StatLog
from engine.wiring.compose import build_engine
from engine.wiring.defaults import with_defaults
from engine.wiring.engine_args import EngineArgs
from engine.wiring.extensions import MANY_DEVICES, wiring_of
from engine.wiring.generation_config import recommended_values
from engine.wiring.loading import public_name

logger = logging.getLogger("uvicorn.error")  # uvicorn's logger, which writes the server's log
OPEN_PATHS = TELEMETRY_PATHS | LIVE_PATHS | CHAT_PATHS  # need no API key
# The HTTP metrics count no requests of load balancers and scrapers, as in vLLM, and none of the pages that
# watch the engine.
UNCOUNTED_PATHS = TELEMETRY_PATHS | LIVE_PATHS | {EVENTS_PATH, "/health", "/ping", "/version"}
LOCAL_NAMES = ["localhost", "127.0.0.1", "[::1]"]
NO_FLAGS = ServeFlags()


class Service:
    """A loaded model behind admission control. `app` makes the HTTP app for it."""

    def __init__(self, args: EngineArgs, flags: ServeFlags = NO_FLAGS) -> None:
        """Load the model, and the adapters of `flags.lora_modules`.

        Raises CheckpointError if a model or an adapter cannot be loaded, ValueError if a value is refused.
        """
        _check_flags(flags, args)
        self.args, self.flags = args, flags
        template = template_text(flags.chat_template) if flags.chat_template else None
        self.template = ChatTemplate.from_pretrained(args.tokenizer or args.model, template)
        names = list(dict.fromkeys(flags.served_model_name or [public_name(args.model)]))  # each once
        self.name = names[0]  # in metrics
        aliases = names[1:]  # further names that clients may use

        self.engine = build_engine(args)
        scheduler = self.engine.scheduler
        assert isinstance(scheduler, ElasticScheduler)  # the only kind that `build_engine` makes
        self.scheduler = scheduler
        limits = queue_limits(
            scheduler.max_num_seqs,
            scheduler.cache.usage().tokens_total,
            self.engine.max_model_len,
            reqs=flags.max_num_queued_reqs,
            tokens=flags.max_num_queued_tokens,
        )

        self.engine_thread = self._make_engine_thread(aliases)
        self.engine_thread.stream_interval = flags.stream_interval
        is_traced = args.otlp_traces_endpoint is not None
        self.backend = Admission(
            TracedBackend(self.engine_thread) if is_traced else self.engine_thread,
            Capacity(limits, scheduler.max_num_seqs),
            flags.request_timeout,
            StepWatch(self.engine),
        )
        self.metrics = self._engine_metrics()

    def _make_engine_thread(self, aliases: Sequence[str]) -> EngineThread:
        """The thread of the engine, not started yet; with `enable_lora`, one that also serves adapters, those
        of --lora-modules from the start. Raises CheckpointError or ValueError for an adapter that is refused.
        """
        adapters = self.engine.adapters
        if not isinstance(adapters, AdapterManager):  # without enable_lora
            return EngineThread(self.engine, self.name, aliases)
        adapter_thread = AdapterEngineThread(self.engine, self.name, adapters, aliases)
        for adapter, folder in named_folders(self.flags.lora_modules or ()).items():
            adapters.load(adapter, adapter_thread.read(adapter, folder))
        return adapter_thread

    def app(
        self,
        hosts: Collection[str],
        api_key: str | None,
        allow_priority: bool,
        costs: CostAccounting | None,
        root_path: str = "",
    ) -> FastAPI:
        """The ASGI app that uvicorn runs. Call this once.

        `hosts` are the host names that requests may be for; an empty collection allows any. Without an
        `api_key`, clients need no key. `allow_priority` lets clients set a request's priority. With `costs`,
        each answer's usage includes its cost. `root_path` is the path under which a proxy shows the app.
        """
        engine = self.engine
        if not self.flags.disable_log_stats:
            stat_log = StatLog(self.metrics, logger.info)
            engine.on_shutdown.append(stat_log.close)
            stat_log.start()
        if costs:
            costs.begin(engine, self.metrics)

        completions = ScoredCompletions(engine.tokenizer, allow_priority)
        chats = Chat(engine.tokenizer, allow_priority)
        tool_flags = optional_module("tool_flags")  # Extension B
        if tool_flags is not None:
            chats.extension = tool_flags.chat_extension(self.engine_thread, **_chat_flags(self.flags))
        for api in (completions, chats):
            self._set_up(api, costs)

        # Half of the connections are left for OPEN_PATHS, such as /metrics, which have no such limit.
        max_requests = max(1, min(MAX_REQUESTS, max_connections() // 2))
        return create_app(
            self.backend,
            extensions=self._extensions(chats),
            api_key=api_key,
            open_paths=OPEN_PATHS,
            allowed_hosts=hosts,
            max_requests=max_requests,
            api=completions,
            details_of=self.details_of,
            root_path=root_path,
        )

    def _set_up(self, api: Completions[Any], costs: CostAccounting | None) -> None:
        """Tell an API what it must know of this engine, its adapters and what an answer costs."""
        api.max_model_len = self.engine.max_model_len
        api.recommended = recommended_values(self.args)
        api.fingerprint = fingerprint(self.args)
        api.name_of_alias = dict.fromkeys(self.engine_thread.aliases, self.name)  # as in vLLM
        if costs:
            api.more_usage.append(usage_cost(costs.price, costs.api_price))
        if isinstance(self.engine_thread, AdapterEngineThread):
            api.more_options.append(self.engine_thread.options)

    def _extensions(self, chats: Chat) -> list[AppExtension]:
        """What the app has beside completions. `chats` is the chat API, for the routes that take chats."""
        engine, metrics = self.engine, self.metrics
        extensions: list[AppExtension] = [
            add_deadlines,
            telemetry_routes(metrics),
            live_routes(LiveView(engine, self.name), self.engine_thread),
            http_metrics(metrics.registry, UNCOUNTED_PATHS),
            chat_routes(engine.tokenizer, engine.config, self.template, chats),
            tokenization_routes(engine.tokenizer, engine.config, self.template, chats.extension),
            responses_route(engine.tokenizer, engine.config, self.template, chats),
            partial(generate_route, recommended=recommended_values(self.args)),
            chat_page,
        ]
        if self.args.otlp_traces_endpoint is not None:
            extensions.append(add_trace_context)
        if isinstance(self.engine_thread, AdapterEngineThread) and self.flags.lora_dir:
            extensions.append(adapter_routes(self.engine_thread, self.flags.lora_dir))
        return extensions

    def _engine_metrics(self) -> EngineMetrics:
        """The engine's metrics, with those of admission, speculation, memory, adapters and ranks."""
        engine = self.engine
        metrics = EngineMetrics(engine, self.name)
        metrics.registry.register(AdmissionMetrics(self.backend, self.scheduler, self.name))
        for capability in engine.capabilities:
            if isinstance(capability, Speculation):
                metrics.registry.register(SpeculationMetrics(capability.tally, self.name))
        _register_information(metrics.registry, self.args, self.scheduler)
        if self.args.tensor_parallel_size > 1:
            wiring_of(MANY_DEVICES).show_ranks(engine, metrics)
        return metrics

    def details_of(self, name: str) -> dict[str, Any]:
        """The fields of a model's card that only the engine knows: `root` is the model or adapter behind the
        name, without the folder that holds it.
        """
        details: dict[str, Any] = {"root": public_name(self.args.model), "parent": None}
        if isinstance(self.engine_thread, AdapterEngineThread) and name in self.engine_thread.manager.key_of:
            details = {"root": name} | self.engine_thread.details_of(name)
        return details | {"max_model_len": self.engine.max_model_len}


def allowed_hosts(host: str, more_names: Collection[str] = ()) -> list[str]:
    """The host names that requests to a server on `host` may be for. An empty list allows any.

    A malicious web page can reach a local server through its own host name, by changing the address of that
    name to this machine (DNS rebinding). So a server on a local address answers only to this machine's names
    and to `more_names`. A server on another address answers to any name, unless `more_names` are given.
    """
    is_local = host in LOCAL_NAMES or f"[{host}]" in LOCAL_NAMES
    if not is_local and not more_names:
        return []
    return [*LOCAL_NAMES, *more_names]


def template_text(file_or_text: str) -> str:
    """The Jinja text of a chat template. As in vLLM, the argument is the text itself if it has a brace or
    several lines, and otherwise the path of a file. Raises CheckpointError if the file cannot be read.
    """
    is_text = any(character in file_or_text for character in "{}\n")
    return file_or_text if is_text else read_text(Path(file_or_text))


def fingerprint(args: EngineArgs) -> str:
    """OpenAI's `system_fingerprint`: a short hash of the versions, the model's name, and how the model is
    computed. If it has changed, the same request with the same seed may get another answer. It does not tell
    of other files under the same name, of another chat template, or of the rounding of another batch.
    """
    args_with_defaults, _ = with_defaults(args)
    device = str(args_with_defaults.device).partition(":")[0]
    dtype = str(args.dtype).removeprefix("torch.")
    settings: list[object] = [
        ruvon_version(),
        torch.__version__,
        public_name(args.model),
        args.load_format,
        device,
        dtype,
        args.quantization,
        args.tensor_parallel_size,
        args.model_impl,
    ]
    return "fp_" + hashlib.sha256(repr(settings).encode()).hexdigest()[:12]


def _check_flags(flags: ServeFlags, args: EngineArgs) -> None:
    """Check names, folders and parsers, before the model is loaded. Raises ValueError if one is refused."""
    for flag, value in {"--lora-modules": flags.lora_modules, "--lora-dir": flags.lora_dir}.items():
        if value and not args.enable_lora:
            raise ValueError(f"{flag} needs --enable-lora")
    if flags.lora_dir and not flags.lora_dir.is_dir():
        raise ValueError(f"--lora-dir {flags.lora_dir}: no such folder")
    for name in flags.served_model_name or ():
        if not (name.isprintable() and name.strip() and len(name) <= MAX_NAME_CHARACTERS):
            message = f"1 to {MAX_NAME_CHARACTERS} printable characters are accepted"
            raise ValueError(f"served_model_name={reprlib.repr(name)}: {message}")
    tool_flags = optional_module("tool_flags")  # Extension B
    if tool_flags is not None:
        tool_flags.check_flags(**_chat_flags(flags))


def _chat_flags(flags: ServeFlags) -> dict[str, Any]:
    """The flags for tools and thoughts, which Extension B takes."""
    names = "tool_call_parser", "enable_auto_tool_choice", "reasoning_parser"
    return {name: getattr(flags, name) for name in names}


def _register_information(registry: CollectorRegistry, args: EngineArgs, scheduler: ElasticScheduler) -> None:
    """Add what vLLM's registry has besides an engine's metrics: the cache, adapters, and Python."""
    cache = scheduler.cache
    assert isinstance(cache, PagedCache | SlotCache)  # `plan_of` makes no other
    caches_prefixes = args.kv_cache == "paged" and args.enable_prefix_caching is not False
    registry.register(
        CacheInfo(
            cache,
            cache_dtype="auto",
            enable_prefix_caching=caches_prefixes,
            gpu_memory_utilization=args.gpu_memory_utilization,
            kv_cache_memory_bytes=args.kv_cache_memory_bytes,
        )
    )
    if args.enable_lora:
        registry.register(AdapterInfo(scheduler, args.max_loras))
    PlatformCollector(registry)
    GCCollector(registry)
