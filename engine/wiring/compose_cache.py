"""Memory for keys and values, as `EngineArgs` asks for it: in pages or in slots. Part 20's wiring.

Promises memory for at least one sequence of `max_model_len` tokens, or a ValueError that says how much there
is. In the order of use: how many bytes (`kv_cache_bytes`), the tensors in them (`make_memory`), the plan that
gives them to requests (`plan_of`).
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
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

MEMORY_SHARE = 0.5  # of what is free once the model is loaded, for keys and values
DEFAULT_BLOCK_SIZE = 16  # tokens
Memory = PageMemory | SlotMemory


@dataclass(frozen=True)
class Sizes:
    """How large steps and sequences may be."""

    max_num_seqs: int  # in a step
    max_num_batched_tokens: int  # in a step
    max_model_len: int  # tokens of a sequence, prompt and output; 0 until the model is loaded


def kv_cache_bytes(
    args: EngineArgs, configs: Sequence[ModelConfig], sizes: Sizes, parameter: torch.Tensor
) -> int:
    """Bytes for the keys and values of these models, on `parameter`'s device and in its dtype.

    They are what `kv_cache_memory_bytes` says; else a share of the device's memory. Raises ValueError: more
    than the device has.
    """
    if args.kv_cache_memory_bytes:
        num_bytes = args.kv_cache_memory_bytes
        _refuse_too_much("kv_cache_memory_bytes", num_bytes, num_bytes, parameter.device)
        return num_bytes
    free, total = memory_of(parameter.device)
    share = args.gpu_memory_utilization
    if parameter.is_cuda:
        if share is None:
            return int(MEMORY_SHARE * free)
        in_use = total - free  # by the model, and by other processes
        return max(0, int(share * total) - in_use)
    # Other programs use a CPU's memory, too: no more than all sequences of a step can fill.
    tokens_per_sequence = _num_blocks(args, sizes.max_model_len) * _block_size(args)
    max_useful = sizes.max_num_seqs * tokens_per_sequence * _token_bytes(configs, parameter)
    return min(max_useful, int((share or MEMORY_SHARE) * free))


def make_memory(
    args: EngineArgs,
    config: ModelConfig,
    sizes: Sizes,
    parameter: torch.Tensor,
    configs: Sequence[ModelConfig],
) -> Memory:
    """Tensors for the keys and values of one model, on `parameter`'s device and in its dtype.

    `configs`: of all models that share the bytes, this one among them; each gets as many blocks, or slots.
    Raises ValueError: no room for one sequence, or others have taken the memory.
    """
    block_size, max_model_len = _block_size(args), sizes.max_model_len
    token_bytes = _token_bytes(configs, parameter)
    block_bytes = block_size * token_bytes
    available = kv_cache_bytes(args, configs, sizes, parameter)
    needed = _num_blocks(args, max_model_len) * block_bytes  # for one sequence
    if available < needed:
        blocks = "" if args.kv_cache == "slots" else f" in blocks of {block_size} tokens"
        raise ValueError(
            f"max_model_len={max_model_len} needs {needed:,} bytes of cache{blocks}; "
            f"there are {available:,}, enough for max_model_len={available // block_bytes * block_size}"
        )
    device, dtype = parameter.device, parameter.dtype
    kernel = attention_kernel(args.attention, config.head_dim, device, dtype)
    make: Callable[[], Memory]
    if args.kv_cache == "slots":
        num_slots = min(sizes.max_num_seqs, available // (max_model_len * token_bytes))
        make = partial(SlotMemory, config, num_slots, max_model_len, device, dtype, kernel)
    else:
        make = partial(
            PageMemory,
            config,
            available // block_bytes,
            block_size,
            device,
            dtype,
            kernel,
            num_swap_blocks=_num_swap_blocks(args, block_bytes),
            **_page_kernels(args.attention),
        )
    return _allocate(make, args, available)


def plan_of(args: EngineArgs, memory: Memory) -> KVCacheManager:
    """A new plan of this memory: which request has which blocks, or which slot."""
    if isinstance(memory, SlotMemory):
        return memory.plan()
    return memory.plan(
        enable_prefix_caching=args.enable_prefix_caching is not False, preemption_mode=args.preemption_mode
    )


def memory_of(device: torch.device) -> tuple[int, int]:
    """(free, total) of the device's memory, in bytes. What a system does not say counts as without bound: an
    allocation then fails if it is too large.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    free, total = host_memory()
    total = sys.maxsize if total is None else total
    return total if free is None else free, total


def _allocate(make: Callable[[], Memory], args: EngineArgs, num_bytes: int) -> Memory:
    """What `make` returns. Raises ValueError: other programs have the memory."""
    try:
        return make()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        swap = f" and swap_space={args.swap_space} GiB" if args.swap_space else ""
        raise ValueError(f"no memory for {num_bytes:,} bytes of keys and values{swap}: {error}") from None


def _block_size(args: EngineArgs) -> int:
    """Tokens in a block; in a slot, any number of tokens may be in use."""
    if args.kv_cache == "slots":
        return 1
    return args.block_size or DEFAULT_BLOCK_SIZE


def _num_blocks(args: EngineArgs, num_tokens: int) -> int:
    """Blocks that so many tokens take."""
    return -(-num_tokens // _block_size(args))  # rounded up


def _token_bytes(configs: Sequence[ModelConfig], parameter: torch.Tensor) -> int:
    """Bytes of one token's keys and values, in all these models."""
    return sum(config.kv_bytes_per_token(parameter.element_size()) for config in configs)


def _num_swap_blocks(args: EngineArgs, block_bytes: int) -> int:
    """Blocks in `swap_space`. Raises ValueError: more than the host's memory, or less than a block."""
    num_bytes = int(args.swap_space * 2**30)
    _refuse_too_much("swap_space", args.swap_space, num_bytes, torch.device("cpu"))
    num_blocks = num_bytes // block_bytes
    if args.swap_space and not num_blocks:
        raise ValueError(f"swap_space={args.swap_space}: a block takes {block_bytes:,} bytes")
    return num_blocks


def _refuse_too_much(name: str, value: float, num_bytes: int, device: torch.device) -> None:
    """Raises ValueError, naming the option and its value: the device has less memory in all."""
    _, total = memory_of(device)
    if num_bytes > total:
        raise ValueError(f"{name}={value}: {device.type} has {total:,} bytes of memory")


def _page_kernels(attention: str) -> dict[str, Any]:
    """`PageMemory`'s arguments for the kernels that read and write pages; none: PyTorch does."""
    if attention != "triton":
        return {}
    from engine.kernels.paged_attention import PagedAttention
    from engine.kernels.paged_prefill import PagedPrefill
    from engine.kernels.store_kv import store_kv

    return {"decode": PagedAttention, "prefill": PagedPrefill, "store": store_kv}
