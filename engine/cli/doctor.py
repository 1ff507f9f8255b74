"""`ruvon doctor`: checks what this machine can run, and measures how fast its memory is. Part 20's wiring.

Each finding is printed as one line, whether it is good or bad. The command does not use the network.
"""

import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from engine.cli.extensions import Finding, modules_of_extensions
from engine.machine.host_memory import host_memory
from engine.models.checkpoint import embedded_models, resolve

if TYPE_CHECKING:
    import torch

EXTRAS = {  # name of an extra in pyproject.toml -> the modules that it installs, and what needs them
    "server": (("fastapi", "uvicorn", "prometheus_client"), "ruvon serve, ruvon demo"),
    "ui": (("streamlit",), "ruvon ui"),
    "notebooks": (("jupyterlab", "matplotlib", "transformers"), "the notebooks"),
}
PROGRAMS = {"chromium": "tests of the pages", "prometheus": "tests of /metrics"}
COPY_BYTES = 128 * 2**20  # more than most processors' caches hold
COPY_ROUNDS = 6  # the first also waits for new pages of memory; the fastest counts


def doctor() -> None:
    """What this machine can run, how fast its memory is, and why something is not available.

    Exit status 1: something is missing that everything needs.
    """
    console = Console(highlight=False)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column()
    table.add_column()
    table.add_column(overflow="fold")  # a path may be longer than the line
    is_broken = False
    for finding in findings():
        if finding.ok:
            mark = "[green]yes[/]"
        elif finding.needed:
            mark = "[red]NO[/]"
            is_broken = True
        else:
            mark = "[yellow]no[/]"
        table.add_row(finding.name, mark, escape(finding.message))
    console.print(table)
    if is_broken:
        sys.exit(1)


def findings() -> Iterator[Finding]:
    """Run all checks, and yield what they find. Ends after the check of PyTorch if PyTorch is not installed,
    because most other checks need it.
    """
    is_supported = (3, 11) <= sys.version_info < (3, 14)
    message = f"{platform.python_version()} at {sys.executable}"
    if not is_supported:
        message += "; 3.11 to 3.13 are accepted"
    yield Finding("Python", message, ok=is_supported, needed=True)
    yield Finding("ruvon", _version("ruvon"))
    if find_spec("torch") is None:
        yield Finding("PyTorch", "not installed: pip install torch", ok=False, needed=True)
        return

    import torch

    cuda = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    yield Finding("PyTorch", f"{torch.__version__}, built {cuda}", needed=True)
    yield from _machine()
    yield from _gpus()
    yield _triton()
    yield _compiled_c()
    yield from _models()
    for module in modules_of_extensions():
        yield from module.findings()

    for name, (modules, use) in EXTRAS.items():
        missing = [module for module in modules if find_spec(module) is None]
        message = use
        if missing:
            message += f": {', '.join(missing)} is missing; pip install 'ruvon[{name}]'"
        yield Finding(f"extra {name}", message, ok=not missing)
    for name, use in PROGRAMS.items():
        path = shutil.which(name)
        message = f"{path}: {use}"
        if path is None:
            message = f"not found; only {use} want it: tools/install_test_tools.sh"
        yield Finding(name, message, ok=path is not None)


def _machine() -> Iterator[Finding]:
    """Check the processor and its memory, and estimate from the memory's speed how long a token takes."""
    import torch

    num_cores = os.cpu_count() or 1
    num_usable = num_cores
    if hasattr(os, "sched_getaffinity"):  # on Linux, where a process may be confined to some of the cores
        num_usable = len(os.sched_getaffinity(0))
    threads = f"{torch.get_num_threads()} threads by default"
    yield Finding("CPU", f"{_processor()}, {num_usable} of {num_cores} cores to use, {threads}")

    free, total = host_memory()
    if total is not None:
        free_text = "" if free is None else f", {free / 2**30:.1f} of them free"
        yield Finding("memory", f"{total / 2**30:.1f} GiB{free_text}")
    bytes_per_second = copy_rate(torch.device("cpu"))
    speed = f"{bytes_per_second / 1e9:.1f} GB/s, read and written by a copy, just now"
    yield Finding("memory speed", speed)

    if "storyteller" in embedded_models():
        size = sum(file.stat().st_size for file in resolve("storyteller").glob("*.safetensors"))
        small = f"storyteller's {size / 1e6:.1f} MB in {size / bytes_per_second * 1e3:.1f} ms"
        large = f"7 billion weights of 16 bits in {14e9 / bytes_per_second:.1f} s"
        yield Finding("a token", f"reads all weights, and so takes about: {small}, {large}")


def copy_rate(device: "torch.device") -> float:
    """The speed of the device's memory: bytes per second, read plus written, in the fastest of some copies of
    COPY_BYTES.
    """
    import torch

    source = torch.zeros(COPY_BYTES // 4, device=device)  # fp32 numbers have 4 bytes
    target = torch.empty_like(source)
    best_seconds = float("inf")
    for _ in range(COPY_ROUNDS):
        start = time.perf_counter()
        target.copy_(source)
        if source.is_cuda:
            torch.cuda.synchronize(device)  # the copy was only launched
        best_seconds = min(best_seconds, time.perf_counter() - start)
    return 2 * COPY_BYTES / best_seconds


def _gpus() -> Iterator[Finding]:
    """Check each GPU: whether our kernels run on it, and the speed of its memory."""
    import torch

    if not torch.cuda.is_available():
        reason = "this PyTorch is built without CUDA"
        if torch.version.cuda:
            reason = "PyTorch sees no NVIDIA GPU: is there one, with its driver (nvidia-smi)"
        yield Finding("GPU", f"{reason}; all runs on the CPU", ok=False)
        return
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        is_supported = (gpu.major, gpu.minor) >= (8, 0)
        speed = copy_rate(torch.device("cuda", index)) / 1e9
        message = f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, copies at {speed:,.0f} GB/s"
        if not is_supported:
            message += f"; our kernels need compute capability 8.0, it has {gpu.major}.{gpu.minor}"
        yield Finding(f"GPU {index}", message, ok=is_supported)


def _triton() -> Finding:
    """Whether our Triton kernels run here, with heads of 64 fp32 numbers as in many small models."""
    import torch

    from engine.wiring.attention_kernel import why_no_triton

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    reason = why_no_triton(64, device, torch.float32)
    message = f"attention='triton' {reason}" if reason else f"triton {_version('triton')}"
    return Finding("Triton kernels", message, ok=not reason)


def _compiled_c() -> Finding:
    """Whether our C code for int8 weights can be compiled here."""
    from engine.machine.compiled import why_not
    from engine.quantization.int8_rows import SOURCE

    reason = why_not(SOURCE)
    return Finding("C of ours", f"int8's product on a CPU: {reason or 'compiled'}", ok=not reason)


def _models() -> Iterator[Finding]:
    """The models that need no download: embedded ones, and those in the Hugging Face hub's cache."""
    from engine.cli.models import cached_models
    from engine.models.config import architectures

    embedded, downloaded = embedded_models(), cached_models()
    yield Finding("models", f"{', '.join(embedded)}: embedded", ok=bool(embedded), needed=True)
    message = "none was downloaded yet; --model gpt2 would be"
    if downloaded:
        message = f"downloaded: {', '.join(downloaded)}"
    message += f" ({', '.join(architectures())} can be run)"
    yield Finding("from the hub", message, ok=bool(downloaded))


def _version(package: str) -> str:
    """The version of an installed package, or a text that says that it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "from a folder, not installed"


def _processor() -> str:
    """The processor's name, or its architecture if the system does not report the name."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    if names:
        return names[0]
    return platform.processor() or platform.machine()
