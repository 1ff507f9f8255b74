"""Which keys a query sees, by hand."""

import torch

from engine.attention.extras import visible


def seen(first: int, count: int, window: int | None) -> list[list[int]]:
    """By query, from position `first` to the last of `count`: the positions of the keys that it sees."""
    positions = torch.arange(count)
    mask = visible(positions[first:, None], positions, window)
    assert mask.dtype == torch.bool, "True where a query sees a key"
    return [row.nonzero().flatten().tolist() for row in mask]


def test_without_a_window_a_query_sees_its_past():
    got = seen(2, 4, None)
    assert got == [[0, 1, 2], [0, 1, 2, 3]], (
        "without a window, a query sees all keys up to its own, its own key among them"
    )


def test_a_window_shows_the_last_keys():
    got = seen(3, 6, 3)
    assert got == [[1, 2, 3], [2, 3, 4], [3, 4, 5]], (
        f"with a window of 3, position 5 sees 3, 4 and 5, and no query sees a later key; yours sees {got[-1]}"
    )


def test_at_the_start_there_are_fewer_keys_than_the_window_shows():
    assert seen(0, 4, 3) == [[0], [0, 1], [0, 1, 2], [1, 2, 3]], (
        "with a window of 3, positions 0 and 1 see all keys up to their own, and no key before 0"
    )


def test_with_a_window_of_one_a_query_sees_itself():
    assert seen(0, 3, 1) == [[0], [1], [2]], "its own key is among the last `window` keys"


def test_queries_need_not_be_the_last_keys():
    mask = visible(torch.tensor([[1], [3]]), torch.arange(5), None)
    assert mask.tolist() == [[True, True, False, False, False], [True, True, True, True, False]], (
        "positions are compared, and not places in the tensors: 1 sees 0 and 1, whatever is behind"
    )


def test_positions_need_not_begin_at_zero():
    """As in a chunk behind a window, whose first keys are left out."""
    mask = visible(torch.tensor([[101], [102]]), torch.tensor([99, 100, 101, 102]), 2)
    assert mask.tolist() == [[False, True, True, False], [False, False, True, True]], (
        "positions are compared, and not places in the tensors: with a window of 2, 101 sees 100 and 101"
    )
