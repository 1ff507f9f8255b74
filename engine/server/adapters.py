"""Adapters over HTTP: a request's `model` selects an adapter; clients load and unload adapters. Part 18.

A client never names a path. The operator names one folder, and a client may load the folders in it by their
names. Without the operator's folder, the two routes do not exist.

Loading and unloading do not stop any stream. Another thread reads the files, one adapter at a time, into host
memory; the process can end while it reads. The adapter stays there while a name or a request refers to the
adapter. The first step that uses the adapter copies the weights into a slot. At most MAX_LOADS loads are
under way; the next load gets a 429.

The adapter of a request is fixed when the request is queued. A request that arrives while its adapter is
replaced gets the old or the new adapter. A request that arrives while its adapter is unloaded gets that
adapter or a 404. When other adapters hold all slots, the request waits in the queue.
Shapes: https://docs.vllm.ai/en/latest/features/lora.html
"""

import asyncio
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TypeVar

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from pydantic import StrictBool

from engine.core.engine_thread import EngineThread
from engine.core.llm_engine import LLMEngine
from engine.core.mailbox import EngineError
from engine.lora.adapter import Adapter, read_adapter
from engine.lora.manager import AdapterError, AdapterManager
from engine.models.checkpoint import CheckpointError
from engine.server.app import AppExtension
from engine.server.backend import Backend
from engine.server.complete import refuse_if_down
from engine.server.errors import RequestError
from engine.server.field_types import Name
from engine.server.fields import Fields
from engine.server.limits import MAX_LOADS
from engine.server.protocol import SamplingFields

Result = TypeVar("Result")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
NAME_RULE = "letters, digits, '.', '_' and '-' are accepted, 64 at most, a letter or a digit first"
STATUS_OF_CODE = {"already_loaded": 400, "not_loaded": 404}  # by the code of an AdapterError


class AdapterEngineThread(EngineThread):
    """A backend that serves the base model as `name`, and each loaded adapter under its own name."""

    def __init__(
        self, engine: LLMEngine, name: str, manager: AdapterManager, aliases: Sequence[str] = ()
    ) -> None:
        super().__init__(engine, name, aliases)
        self.manager = manager
        self._read_lock = asyncio.Lock()  # held while one adapter's files are read
        self._num_loads = 0  # loads under way, or waiting for `_read_lock`

    def models(self) -> list[str]:
        return [*super().models(), *self.manager.key_of]

    def details_of(self, name: str) -> dict[str, str | None]:
        """For `create_app`: the base model's name as an adapter's `parent`; None for the base model."""
        return {"parent": None if name in super().models() else self.name}

    def options(self, body: SamplingFields) -> dict[str, str]:
        """For `Completions.more_options`: {"adapter": name} for an adapter, {} for the base model."""
        if body.model is None or body.model in super().models():
            return {}
        return {"adapter": body.model}

    def read(self, name: str, folder: Path) -> Adapter:
        """Read the adapter in `folder`, which is to be loaded as `name`.

        Raises ValueError if `name` is not accepted, and CheckpointError if the files are not.
        """
        if name in super().models():
            raise ValueError(f"lora_name={name!r}: that is the base model")
        if not NAME.fullmatch(name):
            raise ValueError(f"lora_name={name!r}: {NAME_RULE}")
        slots = self.manager.slots
        return read_adapter(folder, self.engine.config, slots.max_lora_rank, slots.dtype)

    async def load_adapter(self, name: str, folder: Path, load_inplace: bool = False) -> None:
        """Load the adapter in `folder` as `name`.

        With `load_inplace`, the adapter may replace a loaded one; requests queued earlier keep the old one.

        Raises what `read` raises; AdapterError if `name` is taken and `load_inplace` is False; EngineError if
        the engine has ended; RequestError 429 if MAX_LOADS loads are under way.
        """
        if self._num_loads >= MAX_LOADS:
            message = f"{MAX_LOADS} adapters are being loaded already"
            raise RequestError(429, message, code="too_many_loads", retry_after=1)
        self._num_loads += 1
        try:
            async with self._read_lock:
                adapter = await in_daemon_thread(partial(self.read, name, folder))
                await self.between_steps(partial(self.manager.load, name, adapter, load_inplace))
        finally:
            self._num_loads -= 1

    async def unload_adapter(self, name: str) -> None:
        """Stop serving the adapter `name` to new requests; requests queued earlier keep the adapter.

        Raises AdapterError if no adapter has this name, and EngineError if the engine has ended.
        """
        await self.between_steps(partial(self.manager.unload, name))


async def in_daemon_thread(function: Callable[[], Result]) -> Result:
    """Call `function` in a thread of its own; return what it returns, or raise what it raises.

    A read from a network folder that has gone may never return. The process can end then, because it does not
    wait for this thread; it would wait for the threads of `asyncio.to_thread`.
    """
    result: Future[Result] = Future()

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    result.set_running_or_notify_cancel()  # a caller that is cancelled leaves the thread running
    threading.Thread(target=run, name="read adapter", daemon=True).start()
    return await asyncio.wrap_future(result)


class UnloadRequest(Fields):
    """The body of POST /v1/unload_lora_adapter, as in vLLM."""

    lora_name: Name


class LoadRequest(Fields):
    """The body of POST /v1/load_lora_adapter, as in vLLM.

    `lora_path` is a field here only so that the refusal can explain itself: clients may not name paths.
    """

    lora_name: Name
    lora_path: Name | None = None
    load_inplace: StrictBool | None = None  # replace the adapter that has this name


def named_folders(modules: Sequence[str]) -> dict[str, Path]:
    """The folder of each adapter name, from `--lora-modules` items of the form "name=folder".

    Raises ValueError if an item has another form, or if a name is given twice.
    """
    folders: dict[str, Path] = {}
    for module in modules:
        name, equals, folder = module.partition("=")
        if not (name and equals and folder) or name in folders:
            raise ValueError(f"--lora-modules {module}: name=folder is accepted, each name once")
        folders[name] = Path(folder)
    return folders


def adapter_routes(thread: AdapterEngineThread, folder: Path) -> AppExtension:
    """The routes that load and unload adapters, as an extension of `create_app`.

    `folder` holds the adapters that clients may load: the adapter `name` is in `folder / name`.
    """

    def extend(app: FastAPI, backend: Backend) -> None:
        @app.post(
            "/v1/load_lora_adapter",
            summary="Load an adapter from the server's folder",
            response_class=PlainTextResponse,
        )
        async def load(body: LoadRequest) -> PlainTextResponse:
            name = body.lora_name
            _refuse_paths(body)
            refuse_if_down(backend)
            source = folder / name
            if not source.is_dir():
                message = f"the server's folder has no adapter {name!r}"
                raise RequestError(404, message, param="lora_name", code="adapter_not_found")
            try:
                await thread.load_adapter(name, source, load_inplace=bool(body.load_inplace))
            except CheckpointError as error:
                # The client must not learn paths of this machine.
                message = str(error).replace(str(source), name)
                raise RequestError(400, message, param="lora_name", code="bad_adapter") from None
            except (ValueError, EngineError) as error:  # a bad name, the manager's refusal, or no engine
                raise _refusal(error) from None
            return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

        @app.post(
            "/v1/unload_lora_adapter",
            summary="Serve an adapter to no further request",
            response_class=PlainTextResponse,
        )
        async def unload(body: UnloadRequest) -> PlainTextResponse:
            refuse_if_down(backend)
            try:
                await thread.unload_adapter(body.lora_name)
            except (AdapterError, EngineError) as error:
                raise _refusal(error) from None
            return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return extend


def _refuse_paths(body: LoadRequest) -> None:
    """Raise RequestError for a `lora_path`, and for a name that must not become part of a path."""
    if body.lora_path is not None:
        message = f"lora_path={body.lora_path!r} is not accepted: adapters are found by lora_name alone"
        raise RequestError(400, message, param="lora_path")
    if not NAME.fullmatch(body.lora_name):
        raise RequestError(400, f"lora_name={body.lora_name!r}: {NAME_RULE}", param="lora_name")


def _refusal(error: ValueError | EngineError) -> RequestError:
    """The RequestError for an adapter that is refused, or for an engine that has ended."""
    if isinstance(error, EngineError):
        return RequestError(503, str(error), code="engine_down")
    if isinstance(error, AdapterError):
        return RequestError(STATUS_OF_CODE[error.code], str(error), param="lora_name", code=error.code)
    return RequestError(400, str(error), param="lora_name")
