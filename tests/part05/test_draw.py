"""A draw depends on its row's probabilities, seed and position, and on nothing else; and it is fair."""

import pytest
import torch

from engine.decoding.sampling import draw, uniform
from tests.part05 import reference
from tests.part05.dice import CRITICAL, N, chi_squared

SEEDS_AND_POSITIONS = {
    "one seed, ever later": lambda i: (42, i),
    "many seeds, first token": lambda i: (i, 0),
    "many seeds, a late token": lambda i: (-i, 777),
    "seeds far apart": lambda i: (i * 0x9E3779B97F4A7C15 % 2**63, i % 7),
    "seed and position together": lambda i: (i, i),
}


# --- by hand: needles at known places ---


@pytest.fixture
def needle(monkeypatch):
    """needle(u): from now on every uniform number is u."""
    return lambda u: monkeypatch.setattr("engine.decoding.sampling.uniform", lambda seed, position: u)


def drawn(probs) -> int:
    return draw(torch.tensor([probs]), [0], [0]).item()


def test_the_token_is_the_piece_of_the_ruler_that_the_needle_falls_on(needle):
    for u, token in ((0.1, 0), (0.3, 1), (0.49, 1), (0.6, 2), (0.99, 2)):
        needle(u)
        assert drawn([0.25, 0.25, 0.5]) == token, f"u = {u}: the pieces end at 0.25, 0.5 and 1"


def test_a_needle_on_an_edge_belongs_to_the_piece_that_begins_there(needle):
    for u, token in ((0.0, 0), (0.25, 1), (0.5, 2)):
        needle(u)
        assert drawn([0.25, 0.25, 0.5]) == token, (
            f"u = {u} lies on an edge: the token is the first whose piece ends beyond u, not at it"
        )


def test_a_token_without_probability_has_no_piece(needle):
    for u, token in ((0.0, 1), (0.25, 3), (1 - 2**-48, 3)):
        needle(u)
        assert drawn([0.0, 0.25, 0.0, 0.75, 0.0]) == token, f"u = {u}: tokens 0, 2 and 4 have probability 0"


def test_the_needle_is_scaled_to_the_sum_of_the_row(needle):
    needle(0.4)
    assert drawn([0.125, 0.125, 0.25]) == 1, (
        "this row adds up to 0.5, so the needle u = 0.4 falls at 0.4 times that: at 0.2"
    )


def test_a_token_of_one_in_a_billion_has_a_piece(needle):
    needle(0.75)
    assert drawn([0.75, 2**-30, 0.25]) == 1, (
        "the ruler is added up in double precision: in fp32 a piece of 2^-30 vanishes beside 0.75"
    )


def test_each_row_asks_for_the_number_of_its_own_seed_and_position(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "engine.decoding.sampling.uniform", lambda seed, position: asked.append((seed, position)) or 0.5
    )
    draw(torch.full((3, 4), 0.25), [7, 7, -1], [0, 5, 2])
    assert sorted(asked) == [(-1, 2), (7, 0), (7, 5)], (
        "row i's number is uniform(seeds[i], positions[i]), whatever its place in the batch"
    )


def test_the_same_seed_and_position_draw_the_same_in_every_row():
    probs = torch.full((5, 1000), 0.001)
    tokens = draw(probs, [3] * 5, [8] * 5).tolist()
    assert len(set(tokens)) == 1, f"five rows alike, and five different draws: {tokens}"


# --- by counting ---


def counts(values, bins: int) -> list[int]:
    return torch.bincount(torch.tensor(values), minlength=bins).tolist()


@pytest.mark.parametrize("way", SEEDS_AND_POSITIONS)
def test_uniform_is_uniform(way):
    values = [uniform(*SEEDS_AND_POSITIONS[way](i)) for i in range(N)]
    assert min(values) >= 0
    assert max(values) < 1
    assert len(set(values)) == N
    assert chi_squared(counts([int(u * 100) for u in values], 100), [N / 100] * 100) < CRITICAL[99]


@pytest.mark.parametrize(("seeds", "positions"), [(1, 0), (0, 1), (1, 1), (2**32, 0)])
def test_neighbours_are_independent(seeds, positions):
    """Pairs of a draw and its neighbour (next sample of n, next token) fill a grid of 10 x 10 evenly."""
    cells = [
        int(uniform(s, p) * 10) * 10 + int(uniform(s + seeds, p + positions) * 10)
        for s in range(200)
        for p in range(100)
    ]
    assert chi_squared(counts(cells, 100), [N / 100] * 100) < CRITICAL[99]


def test_no_seed_is_another_one_shifted():
    """Counters that are a step apart in one seed's sequence belong to no other seed's."""
    golden = 0x9E3779B97F4A7C15
    mine = {uniform(5, position) for position in range(200)}
    for other in (5 + golden, 5 - golden, 5 + 7 * golden, 6, 4):
        assert not mine & {uniform(other, position) for position in range(200)}


@pytest.mark.parametrize("way", SEEDS_AND_POSITIONS)
def test_frequencies_of_draws_are_the_probabilities(way):
    probs = torch.softmax(reference.random_logits(1, 20, 1, scale=1.0), -1)
    seeds, positions = zip(*map(SEEDS_AND_POSITIONS[way], range(N)), strict=True)
    tokens = draw(probs.expand(N, -1), seeds, positions)
    assert chi_squared(counts(tokens.tolist(), 20), (probs[0] * N).tolist()) < CRITICAL[19]


def test_a_token_without_probability_is_never_drawn():
    probs = torch.tensor([0, 0, 0.2, 0, 0.5, 0.3 - 1e-6, 0, 0])  # their sum is not quite 1, as after rounding
    tokens = draw(probs.expand(N, -1), range(N), [0] * N)
    assert set(tokens.tolist()) == {2, 4, 5}


def test_rounding_over_a_large_vocabulary_stays_inside(monkeypatch):
    monkeypatch.setattr("engine.decoding.sampling.uniform", lambda seed, position: 1 - 2**-48)
    probs = torch.softmax(reference.random_logits(8, 150_000, 2, scale=0.1), -1)
    assert (draw(probs, [0] * 8, [0] * 8) < 150_000).all()


def test_a_row_of_nan_names_no_token_that_does_not_exist():
    tokens = draw(torch.full((2, 10), torch.nan), [1, 2], [0, 0])
    assert (tokens < 10).all(), "searchsorted finds nothing in a row of NaN and answers V: keep it inside"


def test_a_row_draws_the_same_whatever_was_drawn_before():
    probs = torch.full((1, 1000), 0.001)
    first = draw(probs, [3], [2]).item()
    for seed in range(50):
        draw(probs, [seed], [0])
        torch.rand(3)
    assert draw(probs, [3], [2]).item() == first, (
        "a draw keeps no state: seed 3, position 2 gave another token"
    )


def test_seed_and_position_both_matter():
    probs = torch.full((30, 1000), 0.001)
    assert len(set(draw(probs, range(30), [0] * 30).tolist())) > 20, "30 seeds draw nearly the same"
    assert len(set(draw(probs, [0] * 30, range(30)).tolist())) > 20, "30 positions draw nearly the same"


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
def test_every_seed_that_is_accepted_works(seed):
    probs = torch.full((1, 100), 0.01)
    assert draw(probs, [seed], [0]).item() == draw(probs, [seed], [0]).item() < 100
