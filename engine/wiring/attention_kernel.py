"""Chooses the varlen kernel that `EngineArgs.attention` names, and checks that it can run here. Part 9.

- `eager`: plain PyTorch, which computes all scores of a sequence at once.
- `tiled`: plain PyTorch, which computes one tile of the scores at a time.
- `sdpa`: the kernels that come with PyTorch (`scaled_dot_product_attention`).
- `triton`: our own kernels.
"""

import torch

from engine.attention.dense import dense_attention
from engine.attention.flash import sdpa_attention
from engine.attention.interface import VarlenKernel
from engine.attention.tiled import tiled_attention

PYTORCH_KERNELS = {"eager": dense_attention, "tiled": tiled_attention, "sdpa": sdpa_attention}
NAMES = (*PYTORCH_KERNELS, "triton")


def attention_kernel(
    name: str, head_dim: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> VarlenKernel:
    """The kernel called `name`, one of NAMES, for heads of `head_dim` numbers on this device, in this dtype.

    Raises ValueError if the name is unknown, or with the reason why the kernel cannot run here.
    """
    if name in PYTORCH_KERNELS:
        return PYTORCH_KERNELS[name]
    if name not in NAMES:
        raise ValueError(f"attention={name!r}: {', '.join(NAMES)} are accepted")
    device = torch.device(device)
    reason = why_no_triton(head_dim, device, dtype)
    if reason:
        raise ValueError(f"attention='triton' {reason}; {', '.join(PYTORCH_KERNELS)} run here")
    has_tma = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)  # from Hopper on
    if has_tma and dtype.itemsize == 2:  # fp32 gains nothing from TMA
        from engine.kernels.flash_prefill_tma import flash_prefill_tma

        return flash_prefill_tma
    from engine.kernels.flash_prefill import flash_prefill  # imported here because triton is optional

    return flash_prefill


def why_no_triton(head_dim: int, device: torch.device, dtype: torch.dtype) -> str:
    """The reason why our Triton kernels cannot run here, or "" if they can. The reason is a predicate, as in
    "needs a CUDA GPU", so that the caller can put a subject before it.
    """
    try:
        from triton import knobs
    except ImportError:
        return "needs the package triton (pip install 'ruvon[gpu]')"
    if device.type != "cuda" and not knobs.runtime.interpret:
        return f"needs a CUDA GPU, not device={str(device)!r} (TRITON_INTERPRET=1 runs it on a CPU, slowly)"
    if knobs.runtime.interpret and not _is_interpreted():
        return "runs in the interpreter only if TRITON_INTERPRET=1 is set before triton is imported"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return f"needs compute capability 8.0 or more, {torch.cuda.get_device_name(device)} has less"
    if dtype == torch.bfloat16 and knobs.runtime.interpret:
        return "computes in float32 or float16 in the interpreter, which takes bfloat16 for integers"
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"computes in float32, float16 or bfloat16, not {dtype}"
    # `triton.jit` decides at the import of our kernels' module whether they are compiled or interpreted, so
    # the checks come before.
    from engine.kernels.flash_prefill import MAX_HEAD_DIM

    if head_dim > MAX_HEAD_DIM:
        return f"takes heads up to {MAX_HEAD_DIM} wide, not head_dim={head_dim}"
    return ""


def _is_interpreted() -> bool:
    """Whether Triton's own functions, such as `tl.zeros`, were made for the interpreter. Triton decides that
    at the import of the package `triton`, which may come long before that of our kernels.
    """
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction

    return isinstance(tl.zeros, InterpretedFunction)
