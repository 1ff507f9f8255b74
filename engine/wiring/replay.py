"""A recording (`EngineArgs.record`), run again on the same models and compared. Part 20.

Promises that the steps are computed by runners made with the recorded options, without a scheduler, and that
a file from a stranger is checked before anything of it is run: a ValueError says what is wrong in which line.
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
from engine.execution.runner import Executor, ModelRunner
from engine.lora.adapter import read_adapter
from engine.models.checkpoint import CheckpointError
from engine.wiring.devices import Devices, load_devices
from engine.wiring.engine_args import EngineArgs

MAX_ABOUT = 2**20  # characters of a recording's first line


def about(args: EngineArgs) -> dict[str, Any]:
    """The first line of a recording: the options, with none left open, and the versions."""
    values = {
        name: value if isinstance(value, int | float | Mapping | None) else str(value).removeprefix("torch.")
        for name, value in asdict(args).items()
        if name != "record"
    }
    try:
        ruvon_version = version("ruvon")
    except PackageNotFoundError:
        ruvon_version = "from a folder"
    return {"ruvon": ruvon_version, "torch": torch.__version__, "args": values}


def replay(path: str | Path, model: str | None = None) -> Iterator[Compared]:
    """Every step of the recording, run again. `model`: loaded in place of the recorded one, whose folder may
    be elsewhere on this machine. Raises ValueError, CheckpointError: no recording, or what it needs is not
    here.
    """
    # 1. The same models, memory and runners, without an engine.
    args = args_of(path)
    devices = _load(replace(args, model=model) if model else args)
    # 2. What a recorded step may contain, for each runner.
    max_positions = devices.sizes.max_model_len
    bounds = _bounds(devices, devices.runner, max_positions, devices.sizes.max_num_batched_tokens)
    runners: dict[str, tuple[Executor, Bounds]] = {"model": (devices.runner, bounds)}
    if devices.draft is not None and devices.draft_config is not None:
        max_positions = min(max_positions, devices.draft_config.max_positions)
        runners["draft"] = devices.draft, _bounds(devices, devices.draft, max_positions, None)

    def write_adapter(slot: int, folder: str) -> None:
        slots = devices.slots
        if slots is None or type(slot) is not int or not 0 <= slot < slots.max_loras:
            raise ValueError(f"adapter={slot!r}: there is no such slot")
        if not isinstance(folder, str):
            raise ValueError(f"folder={folder!r}: a path is expected")
        try:
            slots.write(slot, read_adapter(folder, devices.config, slots.max_lora_rank, slots.dtype))
        except (CheckpointError, OSError) as error:
            raise ValueError(str(error)) from None

    # 3. The steps, line by line.
    with open(path, encoding="utf-8", errors="replace") as file:
        file.readline(MAX_ABOUT)  # `args_of` has read it
        yield from run_again(file, runners, write_adapter)


def _load(args: EngineArgs) -> Devices:
    """`load_devices` with a stranger's options: whatever they break is a ValueError, or a CheckpointError."""
    try:
        return load_devices(args)
    except (ValueError, TypeError, OverflowError, MemoryError, RuntimeError) as error:
        raise ValueError(f"line 1: {str(error).splitlines()[0]}") from None


def _bounds(devices: Devices, runner: ModelRunner, max_positions: int, num_tokens: int | None) -> Bounds:
    """What a recorded step may contain. Blocks, slots and sequences have the same bounds for both models; a
    draft model may see fewer positions. `num_tokens`: at most in a step; None: no bound.
    """
    memory = devices.memory
    if isinstance(memory, SlotMemory):
        blocks = memory.num_slots, memory.slot_tokens, 0
    else:
        blocks = memory.num_blocks, memory.block_size, memory.num_swap_blocks
    return Bounds(
        devices.config.vocab_size,
        max_positions,
        *blocks,
        devices.slots.max_loras if devices.slots else 0,
        devices.sizes.max_num_seqs,
        num_tokens,
        runner.last_tokens is not None,
    )


def args_of(path: str | Path) -> EngineArgs:
    """The options of the engine that wrote this recording. Raises ValueError: it is no recording."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            recorded_args = json.loads(file.readline(MAX_ABOUT))["about"]["args"]
        names = {spec.name for spec in fields(EngineArgs)} - {"record"}
        values = {name: value for name, value in recorded_args.items() if name in names}
        Path(values["model"])  # raises what is caught below, unless it can be a path
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
