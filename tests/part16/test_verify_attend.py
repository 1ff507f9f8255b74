"""Several new tokens of a sequence in one kernel: as if all were stored first, then attended row by row."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="needs the package triton")

from engine.attention.paged import Pages
from engine.kernels.flash_prefill import MIN_DOT_SIZE
from engine.kernels.verify_attend import MAX_NEW_TOKENS, TOKENS, VerifyAttend
from tests.part13.attending import DH, D, H, Rows
from tests.part13.compiling import compiled
from tests.part13.test_paged_attention import DEVICE, P, scattered


class Pass(Rows):
    """Sequences with (old, new) tokens each, end to end; (0, 0) is a row of nobody."""

    def __init__(self, work: list[tuple[int, int]], biased: bool = True, programs: int = 8) -> None:
        there = [(old, new) for old, new in work if new]
        pages, keys, values, generator = scattered([old + new for old, new in there], H, DH)
        positions = np.concatenate([np.arange(old, old + new) for old, new in there])
        # A page for each new token: as if it were a sequence that ends with it.
        tables = np.repeat(pages.tables, [new for _, new in there], axis=0)
        by_row = Pages(tables, positions + 1, pages.block_size)
        rows = [bool(new) for _, new in work for _ in range(max(new, 1))]
        live = [row for row, somebody in enumerate(rows) if somebody]
        super().__init__(len(rows), live, by_row, keys, values, generator, biased)
        self.attend = VerifyAttend(H, DH, torch.device(DEVICE), len(rows))
        self.attend.max_programs = min(programs, self.attend.max_programs)


WORK = {
    "one token, the first": [(0, 1)],
    "several parts": [(200, 4)],
    "at a block's end, and over it": [(P - 1, 1), (P, 1), (2 * P - 1, 2), (P - 2, 5)],
    "of all kinds": [(70, 3), (0, 2), (5, 1), (64, 4), (63, 1)],
    "rows of nobody": [(0, 0), (20, 2), (0, 0), (0, 0), (3, 1), (0, 0)],
    "more rows than a tile": [(30, MIN_DOT_SIZE + 1), (2, 2)],
    "as many as there may be": [(7, MAX_NEW_TOKENS), (140, 1), (0, 2)],
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
        splits = attend.num_splits(rows)
        assert splits & (splits - 1) == 0, "a power of two"
        tile = MIN_DOT_SIZE if rows <= MIN_DOT_SIZE else MAX_NEW_TOKENS
        assert rows * 3 * splits * tile <= len(attend.parts)


def test_it_compiles_for_a_gpu(tmp_path):
    """The interpreter takes what a GPU's compiler refuses."""
    assert {"_verify"} <= compiled("tests.part16.compiled", tmp_path)


@pytest.mark.parametrize("old", [TOKENS, 2 * TOKENS])
def test_a_part_that_begins_where_the_old_tokens_end_has_none_and_counts_for_none(old):
    made = Pass([(old, 1)], programs=32)
    assert made.attend.num_splits(1) > old // TOKENS, "there are more programs than parts with tokens"
    made.check()


def test_two_programs_join_what_each_has_read():
    made = Pass([(3 * TOKENS, 2)], programs=32)
    assert made.attend.num_splits(2) == 2, "the fewest that have something to join"
    made.check()
