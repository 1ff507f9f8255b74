"""Programmatic dependent launch (PDL): a kernel starts before the previous kernel has ended. Part 13.

With PDL the first programs of a kernel run while the last programs of the previous kernel still run. A kernel
may at once read memory that no kernel of the step writes: weights, old keys, block tables. A kernel must call
`wait` before any other read, and before any write. `release` allows the launch of the next kernel. Without
PDL both functions do nothing. PDL needs compute capability 9.0. Document:
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
    """Wait for the earlier kernels. After `wait` a kernel may read their results, and may write."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def release(PDL: tl.constexpr):
    """Allow the launch of the next kernel. The next kernel's own `wait` still waits for this kernel."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
