"""One kernel that stores a new token's key and value and attends, against `store_kv` and gathering."""

import pytest
import torch

pytest.importorskip("triton", reason="needs the package triton")

from engine.attention.paged import Gathered
from engine.kernels.append_attend import AppendAttend
from engine.kernels.pdl import has_pdl
from engine.kernels.store_kv import store_kv
from tests.part13.test_paged_attention import DEVICE, P, scattered

H, DH = 2, 16
D = H * DH
UNTOUCHED = 7.0  # what lies where nothing is to be written
PDL = has_pdl(torch.device(DEVICE))


class Step:
    """A decode step of sequences of these lengths, the new token counted; a length of 0 is nobody's row."""

    def __init__(self, lens: list[int], biased: bool, programs: int = 8) -> None:
        self.live = [s for s, n in enumerate(lens) if n]
        self.pages, self.keys, self.values, generator = scattered([n for n in lens if n], H, DH)
        places = self.pages.places(range(len(self.live)), self.pages.lens - 1)
        for memory in (self.keys, self.values):  # the new token is not there yet
            memory.flatten(0, 1)[places] = torch.nan
        self.qkv = torch.randn(len(lens), 3 * D, generator=generator).to(DEVICE)
        self.bias = torch.randn(3 * D, generator=generator).to(DEVICE) if biased else None
        width = self.pages.tables.shape[1]
        self.slots = torch.full((len(lens),), -1, dtype=torch.int32, device=DEVICE)
        self.lens = torch.zeros(len(lens), dtype=torch.int32, device=DEVICE)
        # Nobody's row names a block that does not exist: it must not be read.
        self.tables = torch.full((len(lens), width), 10**6, dtype=torch.int32, device=DEVICE)
        self.slots[self.live] = torch.tensor(places, dtype=torch.int32, device=DEVICE)
        self.tables[self.live], self.lens[self.live] = self.pages.on(self.keys.device)
        self.attend = AppendAttend(H, DH, torch.device(DEVICE))
        self.attend.programs = programs  # on a GPU there would be as many as keep it busy

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
        assert (got[dead] == UNTOUCHED).all(), "a row of nobody is not written"


@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("length", [1, P, P + 1, 65, 300])
def test_one_sequence_split_among_programs(length, biased):
    step = Step([length], biased)
    assert step.attend.splits(1) == 4
    step.check()


@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("lens", [[1, P, P + 1, 5, 2], [129, 1, 130, 3, 257]])
def test_sequences_that_are_not_split(lens, biased):
    step = Step(lens, biased)
    assert step.attend.splits(5) == 1
    step.check()


@pytest.mark.parametrize("lens", [[0, 70], [3, 0], [0, 0, 20, 0, 200]])
def test_a_row_of_nobody_disturbs_nobody(lens):
    Step(lens, biased=True).check()


@pytest.mark.parametrize("programs", [8, 1], ids=["split", "whole"])
def test_a_slot_of_minus_one_stores_nothing(programs):
    step = Step([40, 70], biased=False, programs=programs)
    step.slots[1] = -1
    keys, values = step.keys.clone(), step.values.clone()
    first = int(step.slots[0])
    step.run()
    for mine, before in ((step.keys, keys), (step.values, values)):
        flat = mine.flatten(0, 1)
        assert flat[first].isfinite().all(), "the other sequence's new token is stored"
        flat[first] = before.flatten(0, 1)[first]
        assert torch.equal(mine.nan_to_num(9e9), before.nan_to_num(9e9)), "a slot of -1 is no place"


@pytest.mark.parametrize("programs", [8, 1], ids=["split", "whole"])
def test_large_scores_do_not_overflow(programs):
    step = Step([150, 90], biased=False, programs=programs)
    step.qkv[:, :D] *= 300
    step.check(tolerance=1e-3)  # scores of thousands have few digits behind the point


def test_splits_are_a_power_of_two_and_no_more_programs_than_there_are():
    attend = AppendAttend(3, DH, torch.device(DEVICE))
    for programs in (8, 264):
        attend.programs = programs
        for rows in range(1, 100):
            splits = attend.splits(rows)
            assert splits & (splits - 1) == 0
            assert splits == 1 or splits * 3 * rows <= programs, "scratch memory is for so many programs"
            assert 2 * splits * 3 * rows > programs, "fewer programs than there may be"
