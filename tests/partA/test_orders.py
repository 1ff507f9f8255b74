"""What goes to the other ranks: numbers there and back. First a step by hand, field by field."""

import io

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.lora.adapter import Adapter, Factors
from engine.parallel.orders import (
    ADAPTER,
    STEP,
    STOP,
    SequenceNumbers,
    adapter_payload,
    read_adapter_payload,
    read_orders,
    step_from,
    step_numbers,
    write_order,
)
from engine.requests.batch import NO_ADAPTER, Batch, Copy, Draws, Rows

FORK, OUT = range(2)  # places in COPY_KINDS
# A step without copies: two sequences, three tokens, one row that chooses, tables of two blocks.
NUMBERS = [
    2, 3, 1, 2, 0,  # S, T, R, W, copies
    70, 71,  # sequences
    10, 11, 12,  # token_ids
    20, 21, 22,  # positions
    30, 31, 32,  # query_start
    40, 41,  # context_lens
    50, 51, 52, 53,  # tables
    60, 61, 62,  # slots
    80,  # rows.chosen
    90, 91,  # rows.chosen_counts
    100, 101,  # adapters
]  # fmt: skip


def read(*copies: int, num_copies: int = 0) -> Batch:
    """NUMBERS as a step, with these numbers of copies behind them; with copies, all tables are 0."""
    numbers = [*NUMBERS[:4], num_copies, *NUMBERS[5:], *copies]
    if copies:
        numbers[18:22] = [0] * 4
    return step_from(np.array(numbers, dtype=np.int64))


FIELDS = {
    "ids": (("70", "71"), "the S numbers behind the first five stand for the sequences, as texts"),
    "token_ids": ((10, 11, 12), "the T token ids come first, then the positions"),
    "positions": ((20, 21, 22), "the T positions follow the token ids"),
    "query_start": ((30, 31, 32), "query_start has S + 1 numbers, one more than the sequences"),
    "context_lens": ((40, 41), "a length for each of the S sequences"),
    "tables": ([[50, 51], [52, 53]], "tables[S, W] lie row by row, and come before the slots"),
    "slots": ([60, 61, 62], "a slot for each of the T tokens, behind the tables"),
    "adapters": ((100, 101), "an adapter's slot for each of the S sequences"),
    "copies": ((), "there is none"),
}


@pytest.mark.parametrize("field", FIELDS)
def test_each_field_is_taken_from_its_place(field):
    taken = getattr(read(), field)
    expected, words = FIELDS[field]
    assert np.array_equal(taken, expected), f"{field}: {words}"
    is_array = field in ("tables", "slots")
    kind = "an int64 array" if is_array else "a tuple"
    assert type(taken) is (np.ndarray if is_array else tuple), f"{field} is {kind}"
    assert not is_array or taken.dtype == np.int64, f"{field} is an int64 array: its numbers are indices"


def test_rows_and_draws():
    batch = read()
    assert type(batch.rows.chosen) is type(batch.rows.chosen_counts) is tuple, "chosen and counts are tuples"
    assert batch.rows.chosen_counts != (80, 90), "the R chosen rows come before the counts"
    assert batch.rows.chosen == (80,), "there are R chosen rows, however many sequences there are"
    assert batch.rows.chosen_counts == (90, 91), (
        "a count for each of the S sequences, behind the R chosen rows"
    )
    assert batch.rows == Rows((80,), (90, 91)), "nothing is scored"
    assert batch.draws == Draws((), ()), "how a token is drawn is rank 0's affair"


def test_copies_come_last():
    fork = Copy(5, "fork", (1, 2, 3), (6, 7, 8))
    batch = read(5, FORK, 3, 1, 2, 3, 6, 7, 8, num_copies=1)
    assert batch.slots.tolist() == [60, 61, 62], "copies come last, behind the adapters"
    assert type(batch.copies) is type(batch.copies[0].source) is tuple, "copies and their lists are tuples"
    assert [one.kind for one in batch.copies] == ["fork"], "a kind's name stands at its place in COPY_KINDS"
    assert batch.copies == (fork,), "a copy is its number, its kind, n, n sources, then n targets"
    out = Copy(6, "out", (4,), (9,))
    batch = read(5, FORK, 3, 1, 2, 3, 6, 7, 8, 6, OUT, 1, 4, 9, num_copies=2)
    assert batch.copies == (fork, out), "every copy is read, in the order in which they were written"


INTS = st.integers(0, 2**31)


@st.composite
def batches(draw) -> Batch:
    """A step of any shape; its numbers mean nothing."""
    S = draw(st.integers(1, 5))
    counts_new = draw(st.lists(st.integers(1, 4), min_size=S, max_size=S))
    T, W = sum(counts_new), draw(st.integers(1, 4))
    counts = draw(st.lists(st.integers(0, 2), min_size=S, max_size=S))
    R = sum(counts)

    def ints(n: int, low: int = 0) -> tuple[int, ...]:
        return tuple(draw(st.lists(st.integers(low, 2**31), min_size=n, max_size=n)))

    copies = []
    for number in range(draw(st.integers(0, 3))):
        n = draw(st.integers(0, 3))
        copies.append(Copy(number, draw(st.sampled_from(["fork", "out", "in"])), ints(n), ints(n)))
    return Batch(
        tuple(map(str, range(S))),
        ints(T, -1),
        ints(T),
        (0, *np.cumsum(counts_new).tolist()),
        ints(S),
        np.array(ints(S * W)).reshape(S, W),
        np.array(ints(T)),
        tuple(copies),
        Rows(ints(R), tuple(counts)),
        Draws((), ()),
        ints(S, NO_ADAPTER),
    )


@given(batches())
def test_a_step_comes_back_as_it_went(batch):
    sequences = list(range(len(batch.ids)))
    back = step_from(step_numbers(batch, sequences))
    for name in ("token_ids", "positions", "query_start", "context_lens", "copies", "adapters"):
        assert getattr(back, name) == getattr(batch, name), f"{name} is not what was written"
    assert (back.rows.chosen, back.rows.chosen_counts) == (batch.rows.chosen, batch.rows.chosen_counts), (
        "rows"
    )
    assert np.array_equal(back.tables, batch.tables), "tables[S, W] lie row by row"
    assert np.array_equal(back.slots, batch.slots), "slots"
    assert back.ids == tuple(map(str, sequences)), "each sequence has its number for a name"


def test_a_sequence_keeps_its_number_from_step_to_step():
    """A token that is still on the device is found by its sequence's number."""
    numbers = SequenceNumbers()
    a, b = numbers.of(("a", "b"))
    c, b_again = numbers.of(("c", "b"))
    assert b_again == b
    assert len({a, b, c}) == 3, "a sequence that is new gets a number that none had"
    (a_again,) = numbers.of(("a",))
    assert a_again not in (b, c), "and so does one that was away for a step"


def test_an_adapter_comes_back_as_it_went():
    parts = (
        Factors(torch.randn(2, 3), torch.randn(4, 2), slice(0, 4)),
        Factors(torch.randn(2, 3), torch.randn(6, 2), slice(4, 10)),
    )
    adapter = Adapter(2, 0.1, {"blocks.0.attention.qkv": parts, "blocks.0.mlp.up": (Factors(
        torch.randn(2, 3), torch.randn(5, 2)),)})  # fmt: skip
    slot, back = read_adapter_payload(adapter_payload(3, adapter))
    assert (slot, back.rank, back.scale) == (3, 2, 0.1)
    assert list(back.layers) == sorted(adapter.layers)
    for name, factors in adapter.layers.items():
        for here, there in zip(back.layers[name], factors, strict=True):
            assert torch.equal(here.A, there.A)
            assert torch.equal(here.B, there.B)
            assert here.rows == there.rows


def test_orders_are_read_up_to_the_one_to_stop():
    file = io.BytesIO()
    write_order(file, STEP, b"12345678")
    write_order(file, ADAPTER, b"")
    write_order(file, STOP)
    write_order(file, STEP, b"never read")
    file.seek(0)
    assert list(read_orders(file)) == [(STEP, b"12345678"), (ADAPTER, b"")]


@pytest.mark.parametrize("left", [0, 5])
def test_orders_end_with_rank_0(left):
    """In the middle of a header, or before one: there is nobody any more who could go on."""
    file = io.BytesIO()
    write_order(file, STEP, b"1234")
    write_order(file, STEP, b"5678")
    whole = file.getvalue()
    assert list(read_orders(io.BytesIO(whole[: len(whole) // 2 + left]))) == [(STEP, b"1234")]


def test_an_adapter_of_more_than_ten_parts_in_a_layer_comes_back_in_their_order():
    """As texts, 10 would come before 2."""
    parts = tuple(Factors(torch.full((1, 2), float(i)), torch.ones(3, 1)) for i in range(12))
    _, back = read_adapter_payload(adapter_payload(0, Adapter(1, 1.0, {"blocks.0.mlp.up": parts})))
    assert [factors.A[0, 0].item() for factors in back.layers["blocks.0.mlp.up"]] == list(range(12))


def test_an_order_that_rank_0_has_not_finished_is_not_carried_out():
    file = io.BytesIO()
    write_order(file, STEP, b"1234")
    write_order(file, STEP, b"5678")
    cut_off = file.getvalue()[:-1]
    assert list(read_orders(io.BytesIO(cut_off))) == [(STEP, b"1234")]
