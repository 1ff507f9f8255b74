"""Programmatic dependent launch: a kernel starts before the one it follows has ended. Part 13.

With PDL a kernel's first programs run while the last ones of its predecessor still do. What no kernel of the
step writes (weights, old keys, block tables) may be read at once; before anything else is read, and before
anything is written, a kernel must `wait`. `release` lets the next one be launched. Without PDL both do
nothing. Needs compute capability 9.0. Document:
https://docs.nvidia.com/cuda/cuda-c-programming-guide/#programmatic-dependent-launch-and-synchronization
"""

import torch
import triton
import triton.language as tl


def has_pdl(device: torch.device) -> bool:
    """Whether kernels can be launched with PDL on this device."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def wait(PDL: tl.constexpr):
    """Wait for the earlier kernels: afterwards what they wrote may be read, and anything may be written."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def release(PDL: tl.constexpr):
    """Allow the next kernel to be launched."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
