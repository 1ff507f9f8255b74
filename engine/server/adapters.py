"""Adapters over HTTP: `model` in a request chooses one, and they come and go while the server runs. Part 18.

Promises that a client never names a path: what it may load are folders of one folder that the operator named,
by their own names; without that folder the two routes are not there. Neither route stops a stream: files are
read in another thread, one adapter's at a time, into the host's memory, where an adapter stays as long as it
has a name or a request; the first step with it copies it into its slot. A load that finds MAX_LOADS before it
is refused with a 429.

A prompt has the adapter that its `model` names at the moment it is queued, to its end. One that comes while
the name gets another adapter is answered with the old one or with the new one; one that comes while the name
is unloaded, with the adapter or with a 404. When other adapters have all slots, it waits in the queue.
Shapes: https://docs.vllm.ai/en/latest/features/lora.html
"""

import asyncio
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from pydantic import StrictBool

from engine.core.engine_thread import EngineError, EngineThread
from engine.core.llm_engine import LLMEngine
from engine.lora.adapter import Adapter, read_adapter
from engine.lora.manager import AdapterError, AdapterManager
from engine.models.checkpoint import CheckpointError
from engine.server.app import Extension
from engine.server.backend import Backend
from engine.server.errors import RequestError
from engine.server.limits import MAX_LOADS
from engine.server.protocol import Fields, Name, SamplingFields

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
NAME_RULE = "letters, digits, '.', '_' and '-' are accepted, 64 at most, a letter or a digit first"
STATUS = {"already_loaded": 400, "not_loaded": 404}


class AdapterEngine(EngineThread):
    """A backend whose models are the base, under `name`, and the adapters that are loaded."""

    def __init__(self, engine: LLMEngine, name: str, manager: AdapterManager) -> None:
        super().__init__(engine, name)
        self.manager = manager
        self._read_lock = asyncio.Lock()  # one adapter's files at a time
        self._num_loads = 0  # under way, or waiting for the lock

    def models(self) -> list[str]:
        return [self.name, *self.manager.key_of]

    def parent_of(self, name: str) -> str | None:
        """The model that an adapter changes; None for that model itself."""
        return None if name == self.name else self.name

    def options(self, body: SamplingFields) -> dict[str, str]:
        """For `Completions.more_options`: the adapter's name, if `body.model` is not the base."""
        return {} if body.model == self.name else {"adapter": body.model}

    def read(self, name: str, folder: Path) -> Adapter:
        """The adapter in `folder`, to be called `name`. Raises ValueError (the name), CheckpointError (the
        files).
        """
        if not NAME.fullmatch(name) or name == self.name:
            why = "that is the base model" if name == self.name else NAME_RULE
            raise ValueError(f"lora_name={name!r}: {why}")
        slots = self.manager.slots
        return read_adapter(folder, self.engine.config, slots.max_lora_rank, slots.dtype)

    async def load_adapter(self, name: str, folder: Path, load_inplace: bool = False) -> None:
        """Give `name` the adapter in `folder`. With `load_inplace`, requests that were queued before keep the
        one it stood for. Raises what `read` does, AdapterError (the name is taken), EngineError (no engine),
        RequestError (too many at once).
        """
        if self._num_loads >= MAX_LOADS:
            message = f"{MAX_LOADS} adapters are being loaded already"
            raise RequestError(429, message, code="too_many_loads", retry_after=1)
        self._num_loads += 1
        try:
            async with self._read_lock:
                adapter = await asyncio.to_thread(self.read, name, folder)
                await self.between_steps(partial(self.manager.load, name, adapter, load_inplace))
        finally:
            self._num_loads -= 1

    async def unload_adapter(self, name: str) -> None:
        """No new request gets it; those that were queued before keep it. Raises AdapterError, EngineError."""
        await self.between_steps(partial(self.manager.unload, name))


class UnloadRequest(Fields):
    """POST /v1/unload_lora_adapter, as vLLM has it."""

    lora_name: Name


class LoadRequest(UnloadRequest):
    """POST /v1/load_lora_adapter, as vLLM has it; but `lora_path` is refused: clients name no paths here."""

    lora_path: Name | None = None
    load_inplace: StrictBool | None = None  # a name that is taken gets another adapter


def named_folders(modules: Sequence[str]) -> dict[str, Path]:
    """`--lora-modules`: name=folder, each name once. Raises ValueError."""
    folders: dict[str, Path] = {}
    for module in modules:
        name, equals, folder = module.partition("=")
        if not (name and equals and folder) or name in folders:
            raise ValueError(f"--lora-modules {module}: name=folder is accepted, each name once")
        folders[name] = Path(folder)
    return folders


def adapter_routes(engine: AdapterEngine, folder: Path) -> Extension:
    """The two routes. `folder` holds the adapters that clients may load, each in a folder of its name."""

    def extend(app: FastAPI, backend: Backend) -> None:
        @app.post("/v1/load_lora_adapter", response_class=PlainTextResponse)
        async def load(body: LoadRequest) -> PlainTextResponse:
            name = body.lora_name
            if body.lora_path is not None:
                message = (
                    f"lora_path={body.lora_path!r} is not accepted: adapters are found by lora_name alone"
                )
                raise RequestError(400, message, param="lora_path")
            if not NAME.fullmatch(name):  # before anything is looked up by it
                raise RequestError(400, f"lora_name={name!r}: {NAME_RULE}", param="lora_name")
            _refuse_if_down(backend)
            source = folder / name
            if not source.is_dir():
                message = f"the server's folder has no adapter {name!r}"
                raise RequestError(404, message, "lora_name", "adapter_not_found")
            try:
                await engine.load_adapter(name, source, bool(body.load_inplace))
            except CheckpointError as error:
                # Paths of this machine are not the client's business.
                message = str(error).replace(str(source), name)
                raise RequestError(400, message, "lora_name", "bad_adapter") from None
            except (ValueError, EngineError) as error:  # the name's or the manager's; or it has ended
                raise _refusal(error) from None
            return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

        @app.post("/v1/unload_lora_adapter", response_class=PlainTextResponse)
        async def unload(body: UnloadRequest) -> PlainTextResponse:
            _refuse_if_down(backend)
            try:
                await engine.unload_adapter(body.lora_name)
            except (AdapterError, EngineError) as error:
                raise _refusal(error) from None
            return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return extend


def _refuse_if_down(backend: Backend) -> None:
    """A backend that shuts down, or is stuck, says so itself (Part 15)."""
    if not backend.health():
        raise _refusal(EngineError("the engine has ended"))


def _refusal(error: ValueError | EngineError) -> RequestError:
    if isinstance(error, EngineError):
        return RequestError(503, str(error), code="engine_down")
    code = error.code if isinstance(error, AdapterError) else None
    return RequestError(STATUS[code] if code else 400, str(error), "lora_name", code)
