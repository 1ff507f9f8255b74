"""What `ruvon serve` serves: an engine, with all that stands between it and a socket. Part 20's wiring.

Needs the extra `server`; engine/cli/serve.py says so where it is not installed.
"""

import reprlib
from collections.abc import Collection, Sequence
from pathlib import Path

from fastapi import FastAPI

from engine.async_engine import AsyncLLMEngine
from engine.chat_template import ChatTemplate
from engine.cli.loading import public_name
from engine.compose import build_engine
from engine.engine_args import EngineArgs
from engine.server.adapters import AdapterEngine, adapted, adapter_routes, named_folders
from engine.server.admission import Admission
from engine.server.admission_metrics import AdmissionMetrics
from engine.server.app import create_app
from engine.server.chat import Chat, chat
from engine.server.chat_page import OPEN_PATHS as CHAT_PATHS
from engine.server.chat_page import chat_page
from engine.server.deadline import deadlines
from engine.server.generate import generate
from engine.server.limits import MAX_NAME_CHARACTERS, MAX_REQUESTS
from engine.server.priced import priced
from engine.server.room import Room, queue_limits
from engine.server.run import max_connections
from engine.server.scored import ScoredCompletions
from engine.server.watch import StepWatch
from engine.speculation.executor import SpeculativeExecutor
from engine.speculation.metrics import SpeculationMetrics
from engine.telemetry.cost_shown import Costs
from engine.telemetry.metrics import EngineMetrics
from engine.telemetry.routes import OPEN_PATHS, telemetry

LOCAL_NAMES = ["localhost", "127.0.0.1", "[::1]"]


class Service:
    """A loaded model behind admission control, and the app that clients reach it by."""

    def __init__(
        self,
        args: EngineArgs,
        name: str | None = None,
        max_num_queued_reqs: int | None = None,
        max_num_queued_tokens: int | None = None,
        request_timeout: float | None = None,
        lora_modules: Sequence[str] = (),
        lora_dir: Path | None = None,
    ) -> None:
        """`name`: what clients call the model. `lora_modules`: adapters that are there from the start, as
        name=folder; `lora_dir`: others that clients may load. Raises CheckpointError or ValueError.
        """
        for flag, value in {"--lora-modules": lora_modules, "--lora-dir": lora_dir}.items():
            if value and not args.enable_lora:
                raise ValueError(f"{flag} needs --enable-lora")
        if lora_dir and not lora_dir.is_dir():
            raise ValueError(f"--lora-dir {lora_dir}: no such folder")
        if name is not None and not (name.isprintable() and 0 < len(name.strip()) <= MAX_NAME_CHARACTERS):
            message = f"1 to {MAX_NAME_CHARACTERS} printable characters are accepted"
            raise ValueError(f"served_model_name={reprlib.repr(name)}: {message}")
        self.lora_dir = lora_dir
        self.template = ChatTemplate.from_pretrained(args.tokenizer or args.model)
        self.engine, self.name = build_engine(args), name or public_name(args.model)
        limits = queue_limits(
            self.engine.scheduler.max_num_seqs,
            self.engine.scheduler.cache.usage().tokens_total,
            self.engine.max_model_len,
            max_num_queued_reqs,
            max_num_queued_tokens,
        )
        if args.enable_lora:
            self.running = AdapterEngine(self.engine, self.name, self.engine.adapters)
            for adapter, folder in named_folders(lora_modules).items():
                self.running.manager.load(adapter, self.running.read(adapter, folder))
        else:
            self.running = AsyncLLMEngine(self.engine, self.name)
        self.backend = Admission(self.running, Room(limits), request_timeout, StepWatch(self.engine))

    def app(
        self, hosts: Collection[str], api_key: str | None, allow_priority: bool, costs: Costs | None
    ) -> FastAPI:
        """What uvicorn runs. `hosts`: the names it answers to; empty: to any."""
        engine = self.engine
        metrics = EngineMetrics(engine, self.name)
        metrics.registry.register(AdmissionMetrics(self.backend, engine.scheduler, self.name))
        if isinstance(engine.executor, SpeculativeExecutor):
            metrics.registry.register(SpeculationMetrics(engine.executor.tally, self.name))
        completions, chats = ScoredCompletions, Chat
        if costs:
            costs.begin(engine, metrics)
            completions, chats = (
                priced(shape, costs.price, costs.api_price) for shape in (completions, chats)
            )
        adapters = {}
        if isinstance(self.running, AdapterEngine):
            completions, chats = (adapted(shape, self.running) for shape in (completions, chats))
            adapters = {"parent_of": self.running.parent_of}
        extensions = [
            deadlines,
            telemetry(metrics),
            chat(engine.tokenizer, engine.config, self.template, allow_priority, chats),
            generate,
            chat_page,
        ]
        if self.lora_dir:
            extensions.append(adapter_routes(self.running, self.lora_dir))
        return create_app(
            self.backend,
            extensions=extensions,
            api_key=api_key,
            open_paths=OPEN_PATHS | CHAT_PATHS,
            allowed_hosts=hosts,
            max_requests=max(1, min(MAX_REQUESTS, max_connections() // 2)),
            shape=completions(engine.tokenizer, allow_priority),
            **adapters,
        )


def answers_to(host: str, allowed: Collection[str] = ()) -> list[str]:
    """The names a server that listens on `host` answers to; empty: to any.

    A page in a browser may reach this machine under a name of its own, whose address it changes (DNS
    rebinding): who serves this machine alone is asked for by this machine's names.
    """
    local = host in LOCAL_NAMES or f"[{host}]" in LOCAL_NAMES
    return [*LOCAL_NAMES, *allowed] if local or allowed else []
