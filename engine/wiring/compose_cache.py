"""The cache that `EngineArgs` asks for: pages or slots, as many as memory holds. Part 20's wiring."""

import sys
from collections.abc import Callable, Sequence
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

MEMORY_SHARE = 0.5  # of what is free once the model is loaded, for keys and values
DEFAULT_BLOCK_SIZE = 16


Memory = PageMemory | SlotMemory


@dataclass(frozen=True)
class Sizes:
    """How large steps and sequences may be, with nothing left open."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


def plan_of(args: EngineArgs, memory: Memory) -> KVCacheManager:
    """Whose is what of this memory."""
    if isinstance(memory, SlotMemory):
        return memory.plan()
    return memory.plan(
        enable_prefix_caching=args.enable_prefix_caching is not False, preemption_mode=args.preemption_mode
    )


def make_memory(
    args: EngineArgs,
    config: ModelConfig,
    sizes: Sizes,
    parameter: torch.Tensor,
    together: Sequence[ModelConfig],
) -> Memory:
    """Pages or slots for a model, as many as the memory for them holds. `together`: the configurations of all
    models that share it; each has as many. Raises ValueError: no room for one sequence.
    """
    max_model_len = sizes.max_model_len
    kernel = attention_kernel(args.attention, config.head_dim, parameter.device, parameter.dtype)
    token_bytes = _token_bytes(together, parameter)
    block_bytes = _block_size(args) * token_bytes
    there = kv_cache_bytes(args, together, sizes, parameter)
    if there < (need := _blocks(args, max_model_len) * block_bytes):
        blocks = "" if args.kv_cache == "slots" else f" in blocks of {_block_size(args)} tokens"
        raise ValueError(
            f"max_model_len={max_model_len} needs {need:,} bytes of cache{blocks}; "
            f"there are {there:,}, enough for max_model_len={there // block_bytes * _block_size(args)}"
        )
    how = parameter.device, parameter.dtype, kernel
    if args.kv_cache == "slots":
        num_slots = min(sizes.max_num_seqs, there // (max_model_len * token_bytes))
        return _allocated(lambda: SlotMemory(config, num_slots, max_model_len, *how), args, there)
    num_swap_blocks = _swap_bytes(args) // block_bytes
    if args.swap_space and not num_swap_blocks:
        raise ValueError(f"swap_space={args.swap_space}: a block takes {block_bytes:,} bytes")
    kernels: dict[str, Any] = _kernels_for_pages(args.attention)

    def make() -> PageMemory:
        num_blocks, P = there // block_bytes, _block_size(args)
        return PageMemory(config, num_blocks, P, *how, num_swap_blocks=num_swap_blocks, **kernels)

    return _allocated(make, args, there)


def _allocated(make: Callable[[], Memory], args: EngineArgs, num_bytes: int) -> Memory:
    """What `make` makes. Raises ValueError: others have the memory."""
    try:
        return make()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        swap = f" and swap_space={args.swap_space} GiB" if args.swap_space else ""
        raise ValueError(f"no memory for {num_bytes:,} bytes of keys and values{swap}: {error}") from None


def _block_size(args: EngineArgs) -> int:
    """Tokens that memory is given out by."""
    return 1 if args.kv_cache == "slots" else args.block_size or DEFAULT_BLOCK_SIZE


def _blocks(args: EngineArgs, tokens: int) -> int:
    return -(-tokens // _block_size(args))


def _swap_bytes(args: EngineArgs) -> int:
    """Raises ValueError: more than there is."""
    return _there_is("swap_space", args.swap_space, int(args.swap_space * 2**30), torch.device("cpu"))


def _there_is(name: str, value: float, num_bytes: int, device: torch.device) -> int:
    """`num_bytes`. Raises ValueError: the device has less memory in all."""
    _, total = memory_of(device)
    if num_bytes > total:
        raise ValueError(f"{name}={value}: {device.type} has {total:,} bytes of memory")
    return num_bytes


def _kernels_for_pages(attention: str) -> dict[str, Callable]:
    """Who reads pages; by default PyTorch does."""
    if attention != "triton":
        return {}
    from engine.kernels.paged_attention import PagedAttention
    from engine.kernels.paged_prefill import PagedPrefill
    from engine.kernels.store_kv import store_kv

    return {"decode": PagedAttention, "prefill": PagedPrefill, "store": store_kv}


def kv_cache_bytes(
    args: EngineArgs, configs: Sequence[ModelConfig], sizes: Sizes, parameter: torch.Tensor
) -> int:
    """Bytes for the keys and values of these models. Raises ValueError: more than there are."""
    if budget := args.kv_cache_memory_bytes:
        return _there_is("kv_cache_memory_bytes", budget, budget, parameter.device)
    longest = _blocks(args, sizes.max_model_len) * _block_size(args)
    most = sizes.max_num_seqs * longest * _token_bytes(configs, parameter)
    return _memory_bytes(args.gpu_memory_utilization, most, parameter)


def _token_bytes(configs: Sequence[ModelConfig], parameter: torch.Tensor) -> int:
    """What a token takes in the caches of all these models."""
    return sum(config.kv_bytes_per_token(parameter.element_size()) for config in configs)


def _memory_bytes(share: float | None, most: int, parameter: torch.Tensor) -> int:
    """A share of what is free, for keys and values; on a CPU, others use that memory, too: not more than
    `most`, with which no request ever waits for memory. A `share` of a GPU is of all it has, and what is in
    use already counts: the model, and what others have there.
    """
    free, total = memory_of(parameter.device)
    if not parameter.is_cuda:
        return min(most, int(free * (share or MEMORY_SHARE)))
    return int(free * MEMORY_SHARE) if share is None else max(0, int(share * total) - (total - free))


def memory_of(device: torch.device) -> tuple[int, int]:
    """(free, there is) of the device's memory, in bytes. What a system does not say bounds nothing here: who
    takes too much finds out when it is taken.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    free, total = host_memory()
    total = sys.maxsize if total is None else total
    return total if free is None else free, total
