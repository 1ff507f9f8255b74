"""Makes the memory for keys and values that `EngineArgs` asks for, in pages or in slots. Part 20's wiring.

`kv_cache_bytes` says how many bytes to take, `make_memory` allocates the tensors, and `plan_of` makes the
plan that gives blocks or slots to requests. The memory holds at least one sequence of `max_model_len` tokens;
otherwise a ValueError says how much memory there is.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.cache.manager import KVCacheManager
from engine.cache.memory import PageMemory
from engine.cache.slots import SlotMemory
from engine.machine.host_memory import host_memory
from engine.models.config import ModelConfig
from engine.scheduling.elastic import is_out_of_memory
from engine.wiring.attention_kernel import attention_kernel
from engine.wiring.engine_args import EngineArgs

MEMORY_SHARE = 0.5  # default share for keys and values of the memory that is free after the model is loaded
DEFAULT_BLOCK_SIZE = 16  # tokens
Memory = PageMemory | SlotMemory


@dataclass(frozen=True)
class Sizes:
    """Upper bounds for steps and sequences."""

    max_num_seqs: int  # sequences in a step
    max_num_batched_tokens: int  # tokens in a step
    max_model_len: int  # tokens in a sequence, prompt and output; 0: not set, and the model is not loaded yet


def kv_cache_bytes(
    args: EngineArgs,
    configs: Sequence[ModelConfig],
    sizes: Sizes,
    parameter: torch.Tensor,
    num_processes: int = 1,
) -> int:
    """The number of bytes to take for the keys and values of all `configs`, on `parameter`'s device and in
    its dtype: `kv_cache_memory_bytes` if that option is set, otherwise a share of the device's memory; on a
    CPU, no more than the sequences of a step can fill.

    `num_processes` of this engine divide the share of a CPU's memory (Extension A). Raises ValueError if
    `kv_cache_memory_bytes` is more than the device has.
    """
    if args.kv_cache_memory_bytes:
        num_bytes = args.kv_cache_memory_bytes
        _refuse_too_much("kv_cache_memory_bytes", num_bytes, num_bytes, parameter.device)
        return num_bytes
    free, total = free_and_total_memory(parameter.device)
    share = args.gpu_memory_utilization
    if parameter.is_cuda and share is not None:  # a share of all its memory, less what is in use
        in_use = total - free  # by the model, and by other processes
        return max(0, int(share * total) - in_use)
    share_of_free = int((MEMORY_SHARE if share is None else share) * free)
    if parameter.is_cuda:
        return share_of_free
    # Other programs need a CPU's memory, too, so take no more than the sequences of a step can fill.
    tokens_per_sequence = _num_blocks(args, sizes.max_model_len) * _block_size(args)
    max_useful = sizes.max_num_seqs * tokens_per_sequence * _token_bytes(configs, parameter)
    return min(max_useful, share_of_free // num_processes)


def make_memory(
    args: EngineArgs,
    config: ModelConfig,
    sizes: Sizes,
    parameter: torch.Tensor,
    configs: Sequence[ModelConfig],
) -> Memory:
    """Allocate the keys and values of the model of `config`, on `parameter`'s device and in its dtype.

    `configs` lists every model that shares the bytes, this one included: all of them get the same number of
    blocks or slots. Raises ValueError if one sequence of `max_model_len` tokens does not fit, for a
    `swap_space` or an `attention` that this machine does not have, or if the allocation runs out of memory.
    """
    block_size, max_model_len = _block_size(args), sizes.max_model_len
    token_bytes = _token_bytes(configs, parameter)
    block_bytes = block_size * token_bytes
    available_bytes = kv_cache_bytes(args, configs, sizes, parameter)
    needed_bytes = _num_blocks(args, max_model_len) * block_bytes  # for one sequence
    if available_bytes < needed_bytes:
        blocks = "" if args.kv_cache == "slots" else f" in blocks of {block_size} tokens"
        raise ValueError(
            f"max_model_len={max_model_len} needs {needed_bytes:,} bytes of cache{blocks}; "
            f"there are {available_bytes:,}, enough for max_model_len="
            f"{available_bytes // block_bytes * block_size}"
        )
    device, dtype = parameter.device, parameter.dtype
    kernel = attention_kernel(args.attention, config.head_dim, device, dtype)
    try:
        if args.kv_cache == "slots":
            num_slots = min(sizes.max_num_seqs, available_bytes // (max_model_len * token_bytes))
            return SlotMemory(config, num_slots, max_model_len, device, dtype, kernel)
        return PageMemory(
            config,
            available_bytes // block_bytes,
            block_size,
            device,
            dtype,
            kernel,
            num_swap_blocks=_num_swap_blocks(args, block_bytes),
            **_page_kernels(args.attention),
        )
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        swap = f" and swap_space={args.swap_space} GiB" if args.swap_space else ""
        message = f"no memory for {available_bytes:,} bytes of keys and values{swap}: {error}"
        raise ValueError(message) from None


def plan_of(args: EngineArgs, memory: Memory, window: int | None = None) -> KVCacheManager:
    """A new plan for this memory, in which all blocks or slots are free. The plan records which blocks, or
    which slot, each request has. `window`: no layer sees more than this many last tokens.
    """
    if isinstance(memory, SlotMemory):
        return memory.plan()
    return memory.plan(
        enable_prefix_caching=args.enable_prefix_caching is not False,
        preemption_mode=args.preemption_mode,
        window=window,
    )


def free_and_total_memory(device: torch.device) -> tuple[int, int]:
    """The device's memory in bytes, as (free, total). A number that the system does not report is taken as
    `sys.maxsize`: nothing is refused beforehand, and an allocation that is too large fails.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    free, total = host_memory()
    total = sys.maxsize if total is None else total
    free = total if free is None else free
    return free, total


def _block_size(args: EngineArgs) -> int:
    """Tokens in a block. It is 1 with slots, where a sequence's tokens are not rounded up to whole blocks."""
    if args.kv_cache == "slots":
        return 1
    return args.block_size or DEFAULT_BLOCK_SIZE


def _num_blocks(args: EngineArgs, num_tokens: int) -> int:
    """The number of blocks that `num_tokens` tokens take."""
    return -(-num_tokens // _block_size(args))  # rounded up


def _token_bytes(configs: Sequence[ModelConfig], parameter: torch.Tensor) -> int:
    """Bytes of one token's keys and values, summed over all models."""
    return sum(config.kv_bytes_per_token(parameter.element_size()) for config in configs)


def _num_swap_blocks(args: EngineArgs, block_bytes: int) -> int:
    """The number of blocks that fit `swap_space`. Raises ValueError if the swap space is more than the host's
    memory, or less than one block.
    """
    num_bytes = int(args.swap_space * 2**30)
    _refuse_too_much("swap_space", args.swap_space, num_bytes, torch.device("cpu"))
    num_blocks = num_bytes // block_bytes
    if args.swap_space and not num_blocks:
        raise ValueError(f"swap_space={args.swap_space}: a block takes {block_bytes:,} bytes")
    return num_blocks


def _refuse_too_much(name: str, value: float, num_bytes: int, device: torch.device) -> None:
    """Raise ValueError if `num_bytes` is more than the device's total memory. The message names the option
    `name` and its `value`.
    """
    _, total = free_and_total_memory(device)
    if num_bytes > total:
        raise ValueError(f"{name}={value}: {device.type} has {total:,} bytes of memory")


def _page_kernels(attention: str) -> dict[str, Any]:
    """`PageMemory`'s arguments for our Triton kernels, which read and write pages. There are none with other
    kinds of attention: `PageMemory` then uses PyTorch.
    """
    if attention != "triton":
        return {}
    from engine.kernels.paged_attention import PagedAttention
    from engine.kernels.paged_prefill import PagedPrefill
    from engine.kernels.store_kv import store_kv

    return {"decode": PagedAttention, "prefill": PagedPrefill, "store": store_kv}
