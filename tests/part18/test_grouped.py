"""The product for rows of several adapters: each row as if it were alone."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.lora.rows import NO_ADAPTER, GroupedRows, add_grouped, groups_of

IN, K, OUT, SLOTS = 5, 3, 7, 3


def factors(seed: int = 0):
    """down[SLOTS, IN, K], up[SLOTS, K, OUT]"""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SLOTS, IN, K, generator=generator), torch.randn(SLOTS, K, OUT, generator=generator)


def inputs(T: int, seed: int = 1):
    """x[T, IN], y[T, OUT]"""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(T, IN, generator=generator), torch.randn(T, OUT, generator=generator)


def row_by_row(y, x, down, up, slots):
    """The specification."""
    y = y.clone()
    for t, slot in enumerate(slots):
        if slot != NO_ADAPTER:
            y[t] += (x[t] @ down[slot]) @ up[slot]
    return y


def wrong_rows(got: torch.Tensor, want: torch.Tensor) -> list[int]:
    """The indices of the rows that are not as they should be."""
    return [t for t in range(len(want)) if not torch.allclose(got[t], want[t], atol=1e-5)]


PRODUCTS = {getattr(torch.ops.aten, name) for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv")}


class Multiplied(TorchDispatchMode):
    """Counts the rows that go through a `down`, whatever product they are part of."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        given = operation(*args, **(kwargs or {}))
        if operation.overloadpacket in PRODUCTS and given.shape[-1] == K:
            self.rows += given.numel() // K
        return given


def test_the_numbers_of_the_article():
    """Two adapters of rank one; three tokens: the first adapter's, nobody's, the second's."""
    down = torch.tensor([[[1.0], [2.0]], [[0.0], [1.0]]])
    up = torch.tensor([[[3.0, -1.0]], [[10.0, 10.0]]])
    x = torch.tensor([[1.0, 1.0], [5.0, 5.0], [2.0, 4.0]])
    y = torch.zeros(3, 2)
    got = add_grouped(y, x, down, up, [(0, slice(0, 1)), (1, slice(2, 3))])
    assert got is y, "y itself is added to, and given back"
    assert y[0].tolist() == [9.0, -3.0], "the first row has the first adapter"
    assert y[1].tolist() == [0.0, 0.0], "a row of no group is not touched"
    assert y[2].tolist() == [40.0, 40.0], "the third row has the second adapter"


def test_what_was_in_y_is_added_to():
    (down, up), (x, y) = factors(), inputs(4)
    want = row_by_row(y, x, down, up, [1, 1, 1, 1])
    got = add_grouped(y, x, down, up, [(1, slice(0, 4))])
    assert wrong_rows(got, want) == [], "y + x · down · up"


def test_rows_that_are_no_neighbours_are_a_group_all_the_same():
    (down, up), (x, y) = factors(), inputs(5)
    want = row_by_row(y, x, down, up, [0, 2, 0, NO_ADAPTER, 2])
    add_grouped(y, x, down, up, [(0, torch.tensor([0, 2])), (2, torch.tensor([1, 4]))])
    assert wrong_rows(y, want) == [], "y itself has it, for each row of a group, wherever it lies"


def test_the_large_matrix_is_never_made(monkeypatch):
    """A product of IN x K and K x OUT is as large as the layer's own weight."""
    (down, up), (x, y) = factors(), inputs(3)
    made = []
    whole = torch.Tensor.__matmul__

    def watched(a, b):
        made.append((tuple(a.shape), tuple(b.shape)))
        return whole(a, b)

    monkeypatch.setattr(torch.Tensor, "__matmul__", watched)
    add_grouped(y, x, down, up, [(0, slice(0, 3))])
    assert ((IN, K), (K, OUT)) not in made, "x goes through the narrow middle: (x · down) · up"


def test_each_row_goes_through_its_own_adapter_alone():
    """To send all rows through each adapter, and mask, gives the right numbers: with a hundred voices, for a
    hundred times the work.
    """
    (down, up), (x, y) = factors(), inputs(9)
    with Multiplied() as multiplied:
        add_grouped(y, x, down, up, [(0, torch.tensor([0, 2])), (2, slice(4, 7))])
    assert multiplied.rows == 5, f"five rows have an adapter, and {multiplied.rows} were multiplied"


@pytest.mark.parametrize("seed", range(6))
def test_rows_of_any_mixture_are_as_row_by_row(seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 5, (6,), generator=generator).tolist()
    slots = torch.randint(-1, SLOTS, (6,), generator=generator).tolist()
    query_start = [0]
    for n in lengths:
        query_start.append(query_start[-1] + n)
    (down, up), (x, y) = factors(seed), inputs(query_start[-1], seed)
    want = row_by_row(
        y, x, down, up, [slot for slot, n in zip(slots, lengths, strict=True) for _ in range(n)]
    )
    rows = GroupedRows()
    rows.fill(slots, query_start)
    assert wrong_rows(rows.add(y, x, down, up), want) == [], "each row with its own adapter's matrices"


def test_neighbours_are_a_slice_and_nobody_is_in_no_group():
    found = groups_of([2, NO_ADAPTER, 0, 0, 2], [0, 3, 4, 6, 7, 8])
    assert [slot for slot, _ in found] == [0, 2]
    assert found[0][1] == slice(4, 7), "neighbours need no copy"
    assert found[1][1].tolist() == [0, 1, 2, 7]
    assert groups_of([NO_ADAPTER, NO_ADAPTER], [0, 1, 2]) == []


def test_the_next_step_starts_from_nothing():
    rows = GroupedRows()
    rows.fill([0, 1], [0, 1, 2])
    rows.fill([NO_ADAPTER], [0, 2])
    (down, up), (x, y) = factors(), inputs(2)
    before = y.clone()
    assert torch.equal(rows.add(y, x, down, up), before), "whoever had an adapter in the last step"
