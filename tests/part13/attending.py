"""What the tests of kernels that store new tokens and attend share: rows of new tokens, and what storing
first and gathering afterwards makes of them.
"""

from collections.abc import Callable

import torch

from engine.attention.paged import Gathered, Pages
from engine.kernels.pdl import has_pdl
from engine.kernels.store_kv import store_kv
from tests.part13.test_paged_attention import DEVICE

H, DH = 2, 16
D = H * DH
UNTOUCHED = 7.0  # what lies where nothing is to be written
PDL = has_pdl(torch.device(DEVICE))


class Rows:
    """A pass over `rows` rows. Those that are `live` hold a new token each, of `pages`' sequences one by one;
    the others are padding.
    """

    attend: Callable  # the kernel, with its scratch memory

    def __init__(
        self,
        rows: int,
        live: list[int],
        pages: Pages,
        keys: torch.Tensor,
        values: torch.Tensor,
        generator: torch.Generator,
        biased: bool,
    ) -> None:
        self.live, self.pages, self.keys, self.values = live, pages, keys, values
        places = pages.places(range(len(live)), pages.lens - 1)
        for memory in (keys, values):  # the new tokens are not there yet
            memory.flatten(0, 1)[places] = torch.nan
        self.qkv = torch.randn(rows, 3 * D, generator=generator).to(DEVICE)
        self.bias = torch.randn(3 * D, generator=generator).to(DEVICE) if biased else None
        self.slots = torch.full((rows,), -1, dtype=torch.int32, device=DEVICE)
        self.lens = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
        # Nobody's row names a block that does not exist: it must not be read.
        self.tables = torch.full((rows, pages.tables.shape[1]), 10**6, dtype=torch.int32, device=DEVICE)
        self.slots[live] = torch.tensor(places, dtype=torch.int32, device=DEVICE)
        self.tables[live], self.lens[live] = pages.on(keys.device)

    def run(self) -> torch.Tensor:
        out = torch.full((len(self.lens), D), UNTOUCHED, device=DEVICE)
        self.attend(self.qkv, self.bias, self.keys, self.values, self.slots, self.tables, self.lens, out, PDL)
        return out

    def check(self, tolerance: float = 1e-5) -> None:
        keys, values = self.keys.clone(), self.values.clone()
        x = self.qkv if self.bias is None else self.qkv + self.bias
        q, k, v = x[self.live].view(-1, 3, H, DH).unbind(1)
        store_kv(k, v, keys, values, self.slots[self.live])
        want = Gathered(self.pages, H, keys)(q, keys, values).flatten(1)
        for time in ("a first", "a second"):  # nothing is left behind that the next call would stumble over
            got = self.run()
            assert torch.allclose(got[self.live], want, atol=tolerance), (
                f"{time} call gives what storing, then gathering gives"
            )
            for mine, theirs in ((self.keys, keys), (self.values, values)):
                assert torch.allclose(mine, theirs, atol=1e-6, equal_nan=True), (
                    "the new tokens' keys and values lie in their slots, and nothing else has changed"
                )
            assert not self.attend.arrived.any(), f"after {time} call every count of parts is back at 0"
        dead = [s for s in range(len(self.lens)) if s not in self.live]
        assert (got[dead] == UNTOUCHED).all(), "a padding row is not written"
