"""Fills in the defaults of `EngineArgs` that depend on this machine. Part 20's wiring.

Defaults that depend on the model, such as `max_model_len`, are filled in where the model is loaded
(devices.py).
"""

from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from engine.wiring.compose_cache import Sizes
from engine.wiring.engine_args import EngineArgs

GPU_SEQS, CPU_SEQS = 256, 16  # the defaults of max_num_seqs, with and without a GPU


def with_defaults(args: EngineArgs) -> tuple[EngineArgs, Sizes]:
    """The options with this machine's defaults filled in, and the sizes. `Sizes.max_model_len` is 0 if that
    option is not set, because its default is known only once the model is loaded.
    """
    has_gpu = (
        torch.cuda.is_available()
        and torch.cuda.get_device_capability() >= (8, 0)
        and find_spec("triton") is not None
    )
    device, attention, async_scheduling = args.device, args.attention, args.async_scheduling
    if device == "auto":
        device = "cuda" if has_gpu else "cpu"
    on_gpu = str(device).startswith("cuda")
    if attention == "auto":
        attention = "triton" if on_gpu else "sdpa"
    if async_scheduling is None:
        async_scheduling = on_gpu
    max_num_seqs, max_num_batched_tokens = args.max_num_seqs, args.max_num_batched_tokens
    if max_num_seqs is None:
        max_num_seqs = GPU_SEQS if on_gpu else CPU_SEQS
        if max_num_batched_tokens is not None:  # each sequence needs a token in every step
            max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
    if max_num_batched_tokens is None:
        max_num_batched_tokens = max(max_num_seqs, 8192 if on_gpu else 512)
    args = replace(
        args,
        device=device,
        attention=attention,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        async_scheduling=async_scheduling,
    )
    return args, Sizes(max_num_seqs, max_num_batched_tokens, args.max_model_len or 0)


def refuse_absent_gpu(device: str) -> None:
    """Raise ValueError if `device` is cuda or cuda:N and there is no such GPU."""
    kind, _, index = device.partition(":")
    if kind != "cuda":
        return
    num_gpus = torch.cuda.device_count()
    if int(index or 0) >= num_gpus:
        gpus = f"GPUs here: {num_gpus}, from cuda:0 on" if num_gpus else "PyTorch sees no GPU here"
        raise ValueError(
            f"device={device!r}: {gpus}; leave --device out; ruvon doctor says what this machine has"
        )


def options_of(args: EngineArgs) -> dict[str, Any]:
    """The options as JSON has them: paths, devices and dtypes become their names. `EngineArgs` takes them."""
    options = {}
    for name, value in asdict(args).items():
        if isinstance(value, torch.dtype):
            value = str(value).removeprefix("torch.")  # torch.float16 becomes float16
        elif isinstance(value, Path | torch.device):
            value = str(value)
        options[name] = value
    return options
