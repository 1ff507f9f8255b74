"""The group of ranks that share one model: sums, maxima and broadcasts over the ranks. Extension A.

torch.distributed moves the numbers: gloo between CPUs and between ranks that share a GPU, NCCL between GPUs.
The ranks are processes of one machine, and listen on its loopback interface only. The ranks find each other
through a file.
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

    All ranks must call the methods that move numbers in the same order. Each call waits for the slowest rank.
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
        self._sums: dist.ProcessGroup | None = None
        self._host: dist.ProcessGroup | None = None
        try:
            self._join(store, backend)
        except BaseException:
            self.close()
            raise

    def _join(self, store: str, backend: str) -> None:
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
            # Sums in steps are on the device. Numbers at load are on the host, go by gloo, and may take long.
            limit = SUM_SECONDS if backend == "gloo" else START_SECONDS
            self._sums = dist.new_group(backend=backend, timeout=timedelta(seconds=limit))
            self._host = dist.new_group(backend="gloo", timeout=timedelta(seconds=START_SECONDS))
            self.sum(torch.zeros(1, device=device))  # the first sum makes the connections, on loopback

    def sum(self, x: Tensor) -> Tensor:
        """Replace x, of any shape, by the sum over the ranks, and return x. Every rank has the same bits."""
        dist.all_reduce(x, group=self._sums)
        return x

    def max(self, x: Tensor) -> Tensor:
        """The maximum over the ranks of each number of x, as a new tensor. For loading, where a rank may come
        minutes later: waits for up to START_SECONDS.
        """
        on_host = x.cpu()
        dist.all_reduce(on_host, dist.ReduceOp.MAX, group=self._host)
        return on_host.to(x.device)

    def broadcast(self, x: Tensor) -> Tensor:
        """Replace x by rank 0's numbers, and return x."""
        dist.broadcast(x, 0, group=self._sums)
        return x

    def smallest(self, number: int) -> int:
        """The minimum of `number` over the ranks."""
        x = torch.tensor([number])
        dist.all_reduce(x, dist.ReduceOp.MIN, group=self._host)
        return int(x)

    def close(self) -> None:
        """Leave the group, without a wait for the other ranks."""
        if dist.is_initialized():
            # NCCL waits for sums on the device, and one whose rank has ended never returns.
            leaving = threading.Thread(target=dist.destroy_process_group, daemon=True)
            leaving.start()
            leaving.join(CLOSE_SECONDS)
        self._sums = self._host = None  # closes their connections


@contextmanager
def _on_loopback() -> Iterator[None]:
    """In this context, new connections use the loopback interface, which other machines cannot reach."""
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, loopback))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
