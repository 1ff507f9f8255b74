"""The group of ranks that share one model: sums, maxima and broadcasts over the ranks. Extension A.

torch.distributed moves the numbers: gloo between CPUs and between ranks that share a GPU, NCCL between GPUs.
The ranks are processes of one machine, and listen on its loopback interface only. The ranks find each other
through a file. This module does not know models.
"""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

START_SECONDS = 600  # the longest wait until all ranks have started and loaded their parts
# The longest wait in a sum; a rank that has not joined by then counts as lost. Where NCCL sums, the executor
# watches the time: NCCL would end the process without a word, and does not watch the sums inside of graphs.
SUM_SECONDS = 60

CLOSE_SECONDS = 10  # the longest wait until the group is left


class Group:
    """A group of `size` ranks, in which this process is rank `rank`, from 0 to `size` - 1.

    All ranks must call the methods that move numbers in the same order, with tensors of the same shapes. With
    gloo, each call waits for the slowest rank, and raises RuntimeError if another rank has ended or has not
    made the same call in time. With NCCL, a sum on a GPU is only started by the call, and an error may come
    later (`SUM_SECONDS`).
    """

    def __init__(self, rank: int, size: int, store: str, device: torch.device, backend: str) -> None:
        """`store` is the path of a file that does not exist yet, the same on all ranks. `backend` computes
        the sums on `device`: "nccl", or "gloo" on CPUs and where ranks share a GPU.

        Raises RuntimeError if another group is in use in this process, or if a rank does not join in time.
        """
        if dist.is_initialized():
            raise RuntimeError(
                "torch.distributed is in use in this process, by another engine with several ranks perhaps: "
                "shut that down first"
            )
        self.rank, self.size, self.device = rank, size, device
        self._is_closed = False
        self._step_group: dist.ProcessGroup | None = None  # for numbers on the device, in steps
        self._load_group: dist.ProcessGroup | None = None  # for numbers on the host, at load
        try:
            self._join(store, backend)
        except BaseException:
            self.close()
            raise

    def _join(self, store: str, backend: str) -> None:
        """Wait for the other ranks, and make the connections to them."""
        device = self.device
        with _on_loopback():
            if device.type == "cuda":
                torch.cuda.set_device(device)
            dist.init_process_group(
                backend,
                init_method=f"file://{store}",
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=START_SECONDS),
            )
            # NCCL's time limit does not raise an error, but ends the process: it gets the longer limit.
            limit = SUM_SECONDS if backend == "gloo" else START_SECONDS
            self._step_group = dist.new_group(backend=backend, timeout=timedelta(seconds=limit))
            # A rank may load its weights minutes after another rank, so numbers at load may take long.
            self._load_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=START_SECONDS))
            # The first sum makes the connections, which must happen in this context.
            self.all_reduce_sum(torch.zeros(1, device=device))

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        """Replace x, of any shape, by the sum over the ranks, and return x. Every rank gets the same bits.

        With gloo, waits for up to SUM_SECONDS. Raises RuntimeError, as the class's docstring says.
        """
        dist.all_reduce(x, group=self._step_group)
        return x

    def all_reduce_max(self, x: Tensor) -> Tensor:
        """The maximum over the ranks of each number of x, as a new tensor of the same shape on the same
        device.

        For loading, where a rank may come minutes later: waits for up to START_SECONDS. Raises RuntimeError
        if another rank has ended or has not come by then.
        """
        on_host = x.to("cpu", copy=True)
        dist.all_reduce(on_host, dist.ReduceOp.MAX, group=self._load_group)
        return on_host.to(x.device)

    def all_reduce_min(self, number: int) -> int:
        """The minimum of `number` over the ranks. Waits and raises as `all_reduce_max` does."""
        x = torch.tensor([number])
        dist.all_reduce(x, dist.ReduceOp.MIN, group=self._load_group)
        return int(x)

    def broadcast(self, x: Tensor) -> Tensor:
        """Replace x, of any shape, by rank 0's numbers, and return x. Waits and raises as `all_reduce_sum`
        does.
        """
        dist.broadcast(x, src=0, group=self._step_group)
        return x

    def close(self) -> None:
        """Leave the group. Waits for up to CLOSE_SECONDS. A second call does nothing: by then another
        engine's group may be in use.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if dist.is_initialized():
            # Leaving waits for sums on the device, and a sum whose other rank has ended never returns. So a
            # thread leaves, and is left alone after CLOSE_SECONDS.
            leaving = threading.Thread(target=dist.destroy_process_group, daemon=True)
            leaving.start()
            leaving.join(CLOSE_SECONDS)
        self._step_group = self._load_group = None  # closes their connections


@contextmanager
def _on_loopback() -> Iterator[None]:
    """In this context, new connections use the loopback interface, which other machines cannot reach. Not
    thread-safe: it sets variables in `os.environ`, and restores them at the end.
    """
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    variables = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    values_before = {variable: os.environ.get(variable) for variable in variables}
    os.environ.update(dict.fromkeys(variables, loopback))
    try:
        yield
    finally:
        for variable, value in values_before.items():
            if value is None:
                del os.environ[variable]
            else:
                os.environ[variable] = value
