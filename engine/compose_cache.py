"""The cache that `EngineArgs` asks for: pages or slots, as many as memory holds. Part 20's wiring."""

import os
from collections.abc import Callable, Sequence

import torch

from engine.attention.kernels import attention_kernel
from engine.cache.manager import KVCacheManager
from engine.cache.paged import PagedCache
from engine.cache.slots import SlotCache
from engine.config import ModelConfig
from engine.engine_args import EngineArgs

MEMORY_SHARE = 0.5  # of what is free once the model is loaded, for keys and values
DEFAULT_BLOCK_SIZE = 16


def make_cache(
    args: EngineArgs,
    config: ModelConfig,
    max_model_len: int,
    parameter: torch.Tensor,
    together: Sequence[ModelConfig] = (),
) -> KVCacheManager:
    """Pages or slots, as many as the memory for them holds; `together`: all models that share the memory.
    Raises ValueError: no room for one sequence.
    """
    kernel = attention_kernel(args.attention, config.head_dim, parameter.device, parameter.dtype)
    token_bytes = _token_bytes(together or (config,), parameter)
    there = room(args, together or (config,), max_model_len, parameter)
    if there < max_model_len * token_bytes:
        raise ValueError(
            f"max_model_len={max_model_len} needs {max_model_len * token_bytes:,} bytes of cache; "
            f"there are {there:,}, enough for max_model_len={there // token_bytes}"
        )
    how = parameter.device, parameter.dtype, kernel
    if args.kv_cache == "slots":
        num_slots = min(args.max_num_seqs, there // (max_model_len * token_bytes))
        return SlotCache(config, num_slots, max_model_len, *how)
    block_size = args.block_size or DEFAULT_BLOCK_SIZE
    num_blocks = max(there // (block_size * token_bytes), -(-max_model_len // block_size))
    return PagedCache(
        config,
        num_blocks,
        block_size,
        *how,
        enable_prefix_caching=args.enable_prefix_caching is not False,
        num_swap_blocks=int(args.swap_space * 2**30) // (block_size * token_bytes),
        preemption_mode=args.preemption_mode,
        **_kernels_for_pages(args.attention),
    )


def _kernels_for_pages(attention: str) -> dict[str, Callable]:
    """Who reads pages; by default PyTorch does."""
    if attention != "triton":
        return {}
    from engine.kernels.paged_attention import PagedAttention
    from engine.kernels.paged_prefill import PagedPrefill
    from engine.kernels.store_kv import store_kv

    return {"decode": PagedAttention, "prefill": PagedPrefill, "store": store_kv}


def room(
    args: EngineArgs, configs: Sequence[ModelConfig], max_model_len: int, parameter: torch.Tensor
) -> int:
    """Bytes for the keys and values of these models."""
    most = args.max_num_seqs * max_model_len * _token_bytes(configs, parameter)
    return args.kv_cache_memory_bytes or _memory_bytes(args.gpu_memory_utilization, most, parameter)


def _token_bytes(configs: Sequence[ModelConfig], parameter: torch.Tensor) -> int:
    """What a token takes in the caches of all these models."""
    return sum(config.kv_bytes_per_token(parameter.element_size()) for config in configs)


def _memory_bytes(share: float | None, most: int, parameter: torch.Tensor) -> int:
    """A share of what is free, for keys and values; on a CPU, others use that memory, too: not more than
    `most`, with which no request ever waits for memory. A `share` of a GPU is of all it has, and what is in
    use already counts: the model, and what others have there.
    """
    free, total = memory(parameter.device)
    if not parameter.is_cuda:
        return min(most, int(free * (share or MEMORY_SHARE)))
    return int(free * MEMORY_SHARE) if share is None else int(share * total) - (total - free)


def memory(device: torch.device) -> tuple[int, int]:
    """(free, there is) of the device's memory, in bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    page = os.sysconf("SC_PAGE_SIZE")
    return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")
