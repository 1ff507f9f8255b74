"""Several devices for one model, as `EngineArgs` asks for them. Extension A's wiring.

A model or an option that cannot be divided is refused before any process is started. No module imports this
one: engine/wiring/extensions.py finds it by its name.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from engine.core.llm_engine import LLMEngine
from engine.execution.recording import RecordedExecutor
from engine.models.checkpoint import CheckpointError
from engine.models.config import ModelConfig
from engine.models.loader import QUANTIZATION
from engine.parallel.executor import LeadingExecutor
from engine.parallel.group import Group
from engine.parallel.launch import RankLost, Workers
from engine.parallel.rank import ProcessRank
from engine.parallel.shards import divide
from engine.quantization.quantize import QuantizationConfig
from engine.speculation.config import SpeculativeConfig
from engine.wiring.compose_devices import Devices
from engine.wiring.defaults import options_of, with_defaults
from engine.wiring.devices import load_one_device
from engine.wiring.engine_args import EngineArgs

if TYPE_CHECKING:
    from engine.telemetry.metrics import EngineMetrics


def load_devices(args: EngineArgs) -> Devices:
    """Start the other ranks, and load each rank's part of the model.

    Raises CheckpointError or ValueError if the model cannot be divided like this, or a rank cannot be loaded.
    Then no process is left.
    """
    _refuse_indivisible(args)
    size, device_names = args.tensor_parallel_size, _device_names(args)
    each_has_a_gpu = device_names[0] != "cpu" and len(set(device_names)) == size
    backend = "nccl" if each_has_a_gpu else "gloo"
    workers = _start_workers(args, device_names, backend)
    try:
        devices = _load_rank_0(args, device_names[0], workers, backend)
    except RankLost as error:
        workers.stop()
        raise ValueError(f"tensor_parallel_size={size}: {error}") from error
    except BaseException:
        workers.stop()
        raise
    # The engine's options name the kind of all its devices, such as cuda, and not rank 0's device alone.
    return replace(devices, args=replace(devices.args, device=torch.device(device_names[0]).type))


def show_ranks(engine: LLMEngine, metrics: "EngineMetrics") -> None:
    """Add the metrics of each rank to `metrics`. `engine` runs on several ranks."""
    from engine.telemetry.ranks import RankMetrics  # here: prometheus_client is optional

    executor = engine.executor
    if isinstance(executor, RecordedExecutor):
        executor = executor.executor
    assert isinstance(executor, LeadingExecutor)  # `load_devices` makes no other
    RankMetrics(executor.workers, metrics)


def _load_rank_0(args: EngineArgs, device_name: str, workers: Workers, backend: str) -> Devices:
    """Join the group with the other ranks, and load rank 0's part of the model on its device.

    Raises RankLost if another rank ends, and in place of a RuntimeError of this rank. Raises CheckpointError
    or ValueError as `load_one_device` does.
    """
    workers.wait_until_ready()
    with workers.raising_rank_lost():
        group = Group(0, args.tensor_parallel_size, workers.store, torch.device(device_name), backend)
    workers.on_stop(group.close)
    try:
        return load_one_device(replace(args, device=device_name), ProcessRank(group, workers))
    except RuntimeError:
        # A sum fails if another rank ends. Then RankLost says why that rank has ended.
        with workers.raising_rank_lost():
            raise


def _start_workers(args: EngineArgs, device_names: list[str], backend: str) -> Workers:
    """Start the processes of ranks 1 and up. `device_names` has each rank's device; `backend` is that of
    `Group`. Raises ValueError if a process cannot be started; then none is left.
    """
    size = args.tensor_parallel_size
    threads = max(1, torch.get_num_threads() // size)

    def options_for(rank: int) -> Mapping[str, Any]:
        """What a rank's process is told (engine/wiring/rank.py)."""
        # Only rank 0 writes the recording and the trace.
        rank_args = replace(
            args,
            device=device_names[rank],
            speculative_config=_without_proposer(args),
            record=None,
            trace=None,
        )
        return {"threads": threads, "backend": backend, "args": options_of(rank_args)}

    try:
        return Workers(size, options_for)
    except OSError as error:
        raise ValueError(f"tensor_parallel_size={size}: a process cannot be started: {error}") from error


def _without_proposer(args: EngineArgs) -> dict[str, Any] | None:
    """The options of speculation for ranks 1 and up: they verify as many drafts as rank 0, and so have the
    same graphs, but only rank 0 proposes, and has a draft model.
    """
    if args.speculative_config is None:
        return None
    num_drafts = SpeculativeConfig.from_dict(args.speculative_config).num_speculative_tokens
    return {"method": "ngram", "num_speculative_tokens": num_drafts}


def _refuse_indivisible(args: EngineArgs) -> None:
    """Raise CheckpointError or ValueError, naming the field, if the model cannot be divided as `args` say."""
    size = args.tensor_parallel_size
    option = f"tensor_parallel_size={size}"
    config = ModelConfig.from_pretrained(args.model, args.model_impl)
    part = divide(config, size)
    if QUANTIZATION in config.raw:
        raise CheckpointError(
            f"{args.model}: this checkpoint is quantized, and is loaded on one device only; a plain "
            f"checkpoint can be quantized with {option}"
        )
    if args.quantization == "int8_dynamic":
        raise ValueError(f"quantization='int8_dynamic' is not supported with {option}; int8 and int4 are")
    if args.quantization == "int4":
        group_size = QuantizationConfig("int4").group_size
        for name, width in {
            "num_heads · head_dim": part.num_heads * part.head_dim,
            "intermediate_size": part.intermediate_size,
        }.items():
            if width % group_size:
                raise ValueError(
                    f"quantization='int4' with {option}: each rank has {width} of {name}, which is not a "
                    f"multiple of the groups' {group_size}; int8 has no groups"
                )


def _device_names(args: EngineArgs) -> list[str]:
    """The device of each rank, such as ["cuda:0", "cuda:1"]. Raises ValueError if there are too few GPUs, if
    `device` names one GPU, or if the system is not POSIX.
    """
    size = args.tensor_parallel_size
    option = f"tensor_parallel_size={size}"
    if os.name != "posix":
        raise ValueError(f"{option} needs Linux or macOS; 1 is accepted here")
    full_args, _ = with_defaults(args)
    device, num_gpus = str(full_args.device), torch.cuda.device_count()
    if device == "cpu":
        return ["cpu"] * size
    if device != "cuda":
        raise ValueError(f"device={device!r} names one GPU; with {option} cuda is accepted: the first {size}")
    if num_gpus < size:
        raise ValueError(f"{option}: there are {num_gpus} GPUs here, and each rank needs one")
    return [f"cuda:{rank}" for rank in range(size)]
