"""Replay: runs what an engine recorded (`EngineArgs.record`) again on the same models, and compares. Part 20.

Promises that every recorded step is run by a runner like the one that ran it: the same model, options and
adapters, and as much memory. Who scheduled the steps does not matter: only records are run.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from engine.cache.slots import SlotMemory
from engine.execution.recording import Bounds, Compared, run_again
from engine.execution.runner import Executor
from engine.lora.adapter import read_adapter
from engine.models.checkpoint import CheckpointError
from engine.wiring.devices import Devices, load_devices
from engine.wiring.engine_args import EngineArgs

MAX_ABOUT = 2**20  # characters of a recording's first line


def about(args: EngineArgs) -> dict[str, Any]:
    """The first line of a recording: how the engine was made, all options settled."""
    values = {
        name: value if isinstance(value, int | float | Mapping | None) else str(value).removeprefix("torch.")
        for name, value in asdict(args).items()
        if name != "record"
    }
    try:
        ruvon = version("ruvon")
    except PackageNotFoundError:
        ruvon = "from a folder"
    return {"ruvon": ruvon, "torch": torch.__version__, "args": values}


def replay(path: str | Path, model: str | None = None) -> Iterator[Compared]:
    """Run every step of the recording again, and give it with its result. `model`: in place of the one that
    the recording names, whose folder may be elsewhere here. Raises ValueError, CheckpointError: no recording,
    or what it needs is not here.
    """
    args = args_of(path)
    devices = _load_devices(replace(args, model=model) if model else args)
    positions = devices.sizes.max_model_len
    runners: dict[str, tuple[Executor, Bounds]] = {
        "model": (devices.runner, _bounds(devices, positions, devices.sizes.max_num_batched_tokens))
    }
    if devices.draft is not None and devices.draft_config is not None:
        positions = min(positions, devices.draft_config.max_positions)
        runners["draft"] = devices.draft, _bounds(devices, positions, None)

    def lay_adapter(slot: int, folder: str) -> None:
        slots = devices.slots
        if slots is None or type(slot) is not int or not 0 <= slot < slots.max_loras:
            raise ValueError(f"adapter={slot!r}: there is no such slot")
        if not isinstance(folder, str):
            raise ValueError(f"folder={folder!r}: a path is expected")
        try:
            slots.lay(slot, read_adapter(folder, devices.config, slots.max_lora_rank))
        except (CheckpointError, OSError) as error:
            raise ValueError(str(error)) from None

    with open(path, encoding="utf-8", errors="replace") as file:
        file.readline(MAX_ABOUT)
        yield from run_again(file, runners, lay_adapter)


def _load_devices(args: EngineArgs) -> Devices:
    """`load_devices`. Raises ValueError, CheckpointError: no such engine can be made here."""
    try:
        return load_devices(args)
    except (ValueError, TypeError, OverflowError, MemoryError, RuntimeError) as error:  # a stranger's values
        raise ValueError(f"line 1: {str(error).splitlines()[0]}") from None


def _bounds(devices: Devices, positions: int, num_tokens: int | None) -> Bounds:
    """What a record may name: of the memory, which is the same for both models, and of the `positions` that
    the model of this runner reads, which are fewer for a draft model.
    """
    memory = devices.memory
    if isinstance(memory, SlotMemory):
        blocks = memory.num_slots, memory.slot_tokens, 0
    else:
        blocks = memory.num_blocks, memory.block_size, memory.num_swap_blocks
    return Bounds(
        devices.config.vocab_size,
        positions,
        *blocks,
        devices.slots.max_loras if devices.slots else 0,
        devices.sizes.max_num_seqs,
        num_tokens,
    )


def args_of(path: str | Path) -> EngineArgs:
    """How the engine was made that recorded this. Raises ValueError: it is no recording."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            given = json.loads(file.readline(MAX_ABOUT))["about"]["args"]
        known = {spec.name for spec in fields(EngineArgs)} - {"record"}
        values = {name: value for name, value in given.items() if name in known}
        Path(values["model"])
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(
            f"{path}: no recording: its first line does not say how the engine was made"
        ) from None
    try:
        return EngineArgs(**values)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"line 1: {error}") from None
