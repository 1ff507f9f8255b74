"""One kernel that stores a new token's key and value and attends, against `store_kv` and gathering."""

import pytest
import torch

pytest.importorskip("triton", reason="needs the package triton")

from engine.kernels import append_attend
from engine.kernels.append_attend import AppendAttend
from tests.part13.attending import DH, D, H, Rows
from tests.part13.test_paged_attention import DEVICE, P, scattered


class Step(Rows):
    """A decode step of sequences of these lengths, the new token counted; a length of 0 is a padding row."""

    def __init__(self, lens: list[int], biased: bool, programs: int = 16) -> None:
        live = [s for s, n in enumerate(lens) if n]
        super().__init__(len(lens), live, *scattered([n for n in lens if n], H, DH), biased)
        self.attend = AppendAttend(H, DH, torch.device(DEVICE))
        self.attend.max_programs = programs  # on a GPU there would be as many as keep it busy


@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("length", [1, P, P + 1, 65, 300])
def test_one_sequence_split_among_programs(length, biased):
    step = Step([length], biased)
    assert step.attend.num_splits(1) == 8
    step.check()


@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("lens", [[1, P, P + 1, 5, 2], [129, 1, 130, 3, 257]])
def test_sequences_that_are_not_split(lens, biased):
    step = Step(lens, biased)
    assert step.attend.num_splits(5) == 1
    step.check()


@pytest.mark.parametrize("programs", [32, 1], ids=["split", "whole"])
@pytest.mark.parametrize("lens", [[0, 70], [3, 0]])
def test_a_padding_row_disturbs_nobody(lens, programs):
    Step(lens, biased=True, programs=programs).check()


@pytest.mark.parametrize("programs", [32, 1], ids=["split", "whole"])
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


@pytest.mark.parametrize("programs", [32, 1], ids=["split", "whole"])
def test_large_scores_do_not_overflow(programs):
    step = Step([150, 90], biased=False, programs=programs)
    step.qkv[:, :D] *= 300
    step.check(tolerance=1e-3)  # scores of thousands have few digits behind the point


def test_splits_are_a_power_of_two_and_no_more_programs_than_there_are():
    attend = AppendAttend(3, DH, torch.device(DEVICE))
    for programs in (24, 1056):
        attend.max_programs = programs
        for rows in range(1, 100):
            splits = attend.num_splits(rows)
            assert splits & (splits - 1) == 0
            if splits == 1:
                assert 8 * 3 * rows > programs, "there may be eight parts of each sequence"
            else:
                assert splits >= 8, "few parts are slower than none"
                assert splits * 3 * rows <= programs, "scratch memory is for so many programs"
                assert 2 * splits * 3 * rows > programs, "fewer programs than there may be"


@pytest.mark.parametrize(("programs", "taken"), [(32, "_attend_split"), (1, "_attend_whole")])
def test_what_is_split_and_what_is_not_have_a_kernel_each(monkeypatch, programs, taken):
    class Launched(dict):
        def __getitem__(self, grid):
            return lambda *_, **__: self.update(grid=grid)

    kernels = {name: Launched() for name in ("_attend_split", "_attend_whole")}
    for name, kernel in kernels.items():
        monkeypatch.setattr(append_attend, name, kernel)
    Step([40, 70], biased=False, programs=programs).run()
    assert [name for name, kernel in kernels.items() if kernel] == [taken], "the other takes longer"


@pytest.mark.parametrize("programs", [32, 1], ids=["split", "whole"])
def test_slot_0_is_a_slot_like_any_other(programs):
    step = Step([40, 70], biased=False, programs=programs)
    step.slots[1] = 0
    step.run()
    _, key, value = step.qkv[1].view(3, H, DH)
    assert torch.equal(step.keys[0, 0], key), "slot 0 is block 0's first place: the new key lies there"
    assert torch.equal(step.values[0, 0], value), "and the new value"
