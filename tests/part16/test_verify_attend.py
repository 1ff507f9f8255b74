"""Several new tokens of a sequence in one kernel: as if all were stored first, then attended row by row."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="needs the package triton")

from engine.attention.paged import Gathered
from engine.kernels.pdl import has_pdl
from engine.kernels.store_kv import store_kv
from engine.kernels.verify_attend import FEWEST, MOST_NEW, VerifyAttend
from tests.part13.compiling import compiled
from tests.part13.test_paged_attention import DEVICE, P, scattered

H, DH = 2, 16
D = H * DH
UNTOUCHED = 7.0  # what lies where nothing is to be written
PDL = has_pdl(torch.device(DEVICE))


class Pass:
    """Sequences with (old, new) tokens each, end to end; (0, 0) is a row of nobody."""

    def __init__(self, work: list[tuple[int, int]], biased: bool = True, programs: int = 8) -> None:
        live = [(old, new) for old, new in work if new]
        pages, self.keys, self.values, generator = scattered([old + new for old, new in live], H, DH)
        new = np.array([new for _, new in live])
        positions = np.concatenate([np.arange(old, old + new) for old, new in live])
        self.pages = pages.by_row(new, positions)
        places = self.pages.places(np.arange(len(positions)), positions)
        for memory in (self.keys, self.values):  # the new tokens are not there yet
            memory.flatten(0, 1)[places] = torch.nan
        self.live = [i for i, n in enumerate([n for _, new in work for n in [new] * max(new, 1)]) if n]
        S = sum(max(new, 1) for _, new in work)
        self.qkv = torch.randn(S, 3 * D, generator=generator).to(DEVICE)
        self.bias = torch.randn(3 * D, generator=generator).to(DEVICE) if biased else None
        self.slots = torch.full((S,), -1, dtype=torch.int32, device=DEVICE)
        self.lens = torch.zeros(S, dtype=torch.int32, device=DEVICE)
        # Nobody's row names a block that does not exist: it must not be read.
        width = self.pages.tables.shape[1]
        self.tables = torch.full((S, width), 10**6, dtype=torch.int32, device=DEVICE)
        self.slots[self.live] = torch.tensor(places, dtype=torch.int32, device=DEVICE)
        self.tables[self.live], self.lens[self.live] = self.pages.on(self.keys.device)
        self.attend = VerifyAttend(H, DH, torch.device(DEVICE), S)
        self.attend.programs = min(programs, self.attend.programs)

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
                f"{time} call gives what storing all of them, then gathering gives"
            )
            for mine, theirs in ((self.keys, keys), (self.values, values)):
                assert torch.allclose(mine, theirs, atol=1e-6, equal_nan=True), (
                    "the new tokens' keys and values lie in their slots, and nothing else has changed"
                )
            assert not self.attend.arrived.any(), f"after {time} call every count of parts is back at 0"
        dead = [s for s in range(len(self.lens)) if s not in self.live]
        assert (got[dead] == UNTOUCHED).all(), "a row of nobody is not written"


WORK = {
    "one token, the first": [(0, 1)],
    "several parts": [(200, 4)],
    "at a block's end, and over it": [(P - 1, 1), (P, 1), (2 * P - 1, 2), (P - 2, 5)],
    "of all kinds": [(70, 3), (0, 2), (5, 1), (64, 4), (63, 1)],
    "rows of nobody": [(0, 0), (20, 2), (0, 0), (0, 0), (3, 1), (0, 0)],
    "more rows than a tile": [(30, FEWEST + 1), (2, 2)],
    "as many as there may be": [(7, MOST_NEW), (140, 1), (0, 2)],
}


@pytest.mark.parametrize("work", WORK.values(), ids=WORK)
def test_rows_see_the_rows_above_them(work):
    Pass(work, programs=32).check()


@pytest.mark.parametrize("name", ["of all kinds", "more rows than a tile"])
def test_a_program_may_take_all_the_old_tokens(name):
    Pass(WORK[name], programs=1).check()


def test_without_a_bias():
    Pass([(20, 3), (0, 2)], biased=False).check()


def test_large_scores_do_not_overflow():
    made = Pass([(150, 3), (2, 2)], biased=False)
    made.qkv[:, :D] *= 300
    made.check(tolerance=1e-3)  # scores of thousands have few digits behind the point


def test_sequences_that_share_blocks_are_not_taken_for_one():
    """Two that begin alike have the same first blocks, and each its own behind them."""
    made = Pass([(P, 2), (P, 2)])
    first, second = made.pages.tables[0, 0], made.pages.tables[2, 0]
    for memory in (made.keys, made.values):
        memory[second] = memory[first]
    made.pages.tables[2:, 0] = first
    made.tables[2:, 0] = int(first)
    made.check()


def test_scratch_memory_is_enough_for_every_number_of_rows():
    attend = VerifyAttend(3, DH, torch.device(DEVICE), 40)
    for rows in range(1, 41):
        splits = attend.splits(rows)
        assert splits & (splits - 1) == 0, "a power of two"
        tile = FEWEST if rows <= FEWEST else MOST_NEW
        assert rows * 3 * splits * tile <= len(attend.parts)


def test_it_compiles_for_a_gpu(tmp_path):
    """The interpreter takes what a GPU's compiler refuses."""
    assert {"_verify", "_go_on"} <= compiled("tests.part16.compiled", tmp_path)
