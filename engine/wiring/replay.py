"""Runs the steps of a recording (`EngineArgs.record`) again and compares their tokens. Part 20.

Runners that are made with the recorded options compute the steps; there is no scheduler. The file may come
from a stranger, so each line is checked before it is run: a ValueError names the line and says what is wrong
in it.
"""

import json
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine.cache.slots import SlotMemory
from engine.execution.bounds import Bounds
from engine.execution.recording import ComparedStep, run_again
from engine.execution.runner import Executor, ModelRunner
from engine.lora.adapter import read_adapter
from engine.machine.version import ruvon_version
from engine.models.checkpoint import CheckpointError
from engine.wiring.compose_devices import Devices
from engine.wiring.defaults import options_of
from engine.wiring.devices import load_devices
from engine.wiring.engine_args import EngineArgs

MAX_HEADER_CHARACTERS = 2**20  # that are read of a recording's first line
# Options of what watches an engine. Steps do not depend on them, and a file cannot ask for them.
WATCHING_OPTIONS = {"record", "trace", "otlp_traces_endpoint"}


def recording_header(args: EngineArgs) -> dict[str, Any]:
    """What a recording's first line says: the options as JSON values, and the versions of ruvon and PyTorch.
    `args` must have its defaults filled in, as `Devices.args` has.
    """
    # Steps depend on none of these, and another machine need not have their paths.
    left_out = WATCHING_OPTIONS | {"generation_config"}
    values = {name: value for name, value in options_of(args).items() if name not in left_out}
    return {"ruvon": ruvon_version(), "torch": torch.__version__, "args": values}


def args_of(path: str | Path) -> EngineArgs:
    """The options of the engine that wrote this recording. Raises ValueError if the file cannot be read, is
    not a recording, or has options that are refused.
    """
    recorded_args = _recorded_args(path)
    if not isinstance(recorded_args, dict) or not isinstance(recorded_args.get("model"), str):
        raise ValueError(f"{path}: no recording: its first line does not say how the engine was made")
    names = {spec.name for spec in fields(EngineArgs)} - WATCHING_OPTIONS
    values = {name: value for name, value in recorded_args.items() if name in names}
    try:
        return EngineArgs(**values)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"line 1: {error}") from None


def replay(path: str | Path, model: str | None = None) -> Iterator[ComparedStep]:
    """Run every step of the recording again, and yield how the tokens compare with the recorded ones.

    `model` replaces the recorded model's name or folder, because the folder may lie elsewhere on this
    machine. Raises ValueError if the file cannot be read or is not a recording, and CheckpointError or
    ValueError if this machine lacks what the recorded options need.
    """
    # 1. The models, memory and runners of the recorded options, without an engine.
    args = args_of(path)
    devices = _load(replace(args, model=model) if model else args)
    # 2. The bounds of a recorded step, for each runner.
    sizes = devices.sizes
    bounds = _bounds(devices, devices.runner, sizes.max_model_len, sizes.max_num_batched_tokens)
    runners: dict[str, tuple[Executor, Bounds]] = {"model": (devices.executor, bounds)}
    if devices.draft_runner is not None and devices.draft_config is not None:
        max_positions = min(sizes.max_model_len, devices.draft_config.max_positions)
        draft_bounds = _bounds(devices, devices.draft_runner, max_positions, num_tokens=None)
        runners["draft"] = (devices.draft_runner, draft_bounds)
    # 3. The steps, line by line.
    write_adapter = partial(_write_adapter, devices)
    with open(path, encoding="utf-8", errors="replace") as file:
        file.readline(MAX_HEADER_CHARACTERS)  # skip the first line, which `args_of` has read
        yield from run_again(file, runners, write_adapter)


def _recorded_args(path: str | Path) -> Any:
    """The options in a recording's first line, of any type; None if the line has none. Raises ValueError if
    the file cannot be read.
    """
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return json.loads(file.readline(MAX_HEADER_CHARACTERS))["about"]["args"]
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError):  # no JSON, or JSON of another form
        return None


def _load(args: EngineArgs) -> Devices:
    """Call `load_devices` with options from a stranger's file. Any error that they cause becomes a
    ValueError, unless it is a CheckpointError.
    """
    try:
        return load_devices(args)
    except (ValueError, TypeError, OverflowError, MemoryError, RuntimeError) as error:
        message = str(error) or type(error).__name__  # a MemoryError may have no message
        raise ValueError(f"line 1: {message.splitlines()[0]}") from None


def _bounds(devices: Devices, runner: ModelRunner, max_positions: int, num_tokens: int | None) -> Bounds:
    """The bounds of a recorded step for one runner. The model and the draft model share the bounds of blocks,
    slots and sequences; a draft model may see fewer positions. `num_tokens` is the most tokens in a step, or
    None for no bound.
    """
    memory = devices.memory
    if isinstance(memory, SlotMemory):
        num_blocks, block_size, num_swap_blocks = memory.num_slots, memory.slot_tokens, 0
    else:
        num_blocks, block_size = memory.num_blocks, memory.block_size
        num_swap_blocks = memory.num_swap_blocks
    return Bounds(
        vocab_size=devices.config.vocab_size,
        max_positions=max_positions,
        num_blocks=num_blocks,
        block_size=block_size,
        num_swap_blocks=num_swap_blocks,
        num_adapters=devices.slots.max_loras if devices.slots else 0,
        num_seqs=devices.sizes.max_num_seqs,
        num_tokens=num_tokens,
        has_last_tokens=runner.last_tokens is not None,
    )


def _write_adapter(devices: Devices, slot: int, folder: str) -> None:
    """Read the adapter in `folder` and write its weights to this slot. Raises ValueError for a slot that is
    not there, and for a folder that cannot be read.
    """
    slots = devices.slots
    if slots is None or type(slot) is not int or not 0 <= slot < slots.max_loras:
        raise ValueError(f"adapter={slot!r}: there is no such slot")
    if not isinstance(folder, str):
        raise ValueError(f"folder={folder!r}: a path is expected")
    try:
        slots.write(slot, read_adapter(folder, devices.config, slots.max_lora_rank, slots.dtype))
    except (CheckpointError, OSError) as error:
        raise ValueError(str(error)) from None
