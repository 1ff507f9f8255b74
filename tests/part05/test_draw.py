"""A draw depends on its row's probabilities, seed and position, and on nothing else; and it is fair."""

import math

import numpy as np
import pytest
import torch

from engine.decoding.noise import CACHE_NUMBERS, _key, _mix, exponential_noise, uniform
from engine.decoding.sampling import draw
from tests.part05 import reference
from tests.part05.dice import CRITICAL, N, chi_squared

CPU = torch.device("cpu")
SEEDS_AND_POSITIONS = {
    "one seed, ever later": lambda i: (42, i),
    "many seeds, first token": lambda i: (i, 0),
    "many seeds, a late token": lambda i: (-i, 777),
    "seeds far apart": lambda i: (i * 0x9E3779B97F4A7C15 % 2**63, i % 7),
    "seed and position together": lambda i: (i, i),
}


# --- by hand: noise that is known ---


@pytest.fixture
def noise(monkeypatch):
    """noise(rows): from now on the noise is rows[R][V]. Returns what is asked for: (seed, position)s."""

    def known(rows):
        asked = []

        def noise_of(seeds, positions, V, device):
            asked.extend(zip(seeds, positions, strict=True))
            return torch.tensor(rows)[: len(seeds)]

        monkeypatch.setattr("engine.decoding.sampling.exponential_noise", noise_of)
        return asked

    return known


def drawn(probs) -> int:
    return draw(torch.tensor([probs]), [0], [0]).item()


@pytest.mark.parametrize(
    ("times", "first"),
    [((4, 2, 2), 2), ((1, 2, 8), 0), ((4, 0.5, 2), 1), ((8, 1, 4), 1), ((0.5, 4, 4), 0), ((1, 8, 9), 0)],
)
def test_the_first_to_arrive_is_drawn(noise, times, first):
    noise([times])
    arrivals = [time / share for time, share in zip(times, (0.25, 0.25, 0.5), strict=True)]
    assert drawn([0.25, 0.25, 0.5]) == first, (
        f"noise {times} over the probabilities 0.25, 0.25, 0.5: arrivals {arrivals}, the first to arrive wins"
    )


def test_a_token_without_probability_never_arrives(noise):
    noise([(1e-10, 22.0, 1e-10)])
    assert drawn([0.0, 1e-12, 0.0]) == 1, "tokens 0 and 2 have probability 0: however small their noise is"


def test_a_row_need_not_add_up_to_one(noise):
    noise([(4.0, 2.0, 2.0)])
    says = "a tenth of each probability: all arrive ten times later, and the first to arrive wins"
    assert drawn([0.025, 0.025, 0.05]) == 2, says


def test_each_row_asks_for_the_noise_of_its_own_seed_and_position(noise):
    asked = noise([[1.0] * 4] * 3)
    draw(torch.full((3, 4), 0.25), [7, 7, -1], [0, 5, 2])
    assert sorted(asked) == [(-1, 2), (7, 0), (7, 5)], (
        "row i's noise is that of seeds[i] and positions[i], whatever its place in the batch"
    )


def test_a_row_longer_than_a_processors_cache_has_its_noise():
    """Noise is computed for a few rows at a time: here one is too many already."""
    V = CACHE_NUMBERS + 1
    rows = exponential_noise([1, 2, 3], [0, 4, 4], V, CPU)
    assert rows.shape == (3, V)
    assert rows[2].equal(exponential_noise([3], [4], V, CPU)[0])


def test_the_smallest_and_the_largest_hash_give_noise_that_is_finite_and_above_zero(monkeypatch):
    """Noise 0 would be a division by zero: a token of probability 0 would be drawn."""
    exponential_noise([0], [0], 2, CPU)  # the ids' hashes are remembered
    ends = np.array([[-(2**31), 2**31 - 1]], dtype=np.int32)
    monkeypatch.setattr("engine.decoding.noise._hash32", lambda *_: ends)
    least, most = exponential_noise([0], [0], 2, CPU)[0].tolist()[::-1]
    assert 0 < least < 1e-9
    assert 20 < most < 30


@pytest.mark.parametrize("shift", [0, 32], ids=["low", "high"])
def test_either_half_of_a_key_decides(monkeypatch, shift):
    monkeypatch.setattr("engine.decoding.noise._key", lambda seed, position: seed << shift)
    first, second = exponential_noise([1, 2], [0, 0], 100, CPU)
    assert not first.isclose(second).any()


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


NEIGHBOURS = {"seed": (1, 0, 0), "position": (0, 1, 0), "token": (0, 0, 1), "far token": (0, 0, 4096)}


def shares(noise: torch.Tensor) -> torch.Tensor:
    """noise -> how large a share of exponential numbers is smaller: uniform in 0 to 1."""
    return -torch.expm1(-noise.double())


@pytest.mark.parametrize("way", SEEDS_AND_POSITIONS)
def test_noise_is_exponential(way):
    seeds, positions = zip(*map(SEEDS_AND_POSITIONS[way], range(N // 20)), strict=True)
    noise = exponential_noise(seeds, positions, 20, torch.device("cpu"))
    assert (noise > 0).all()
    observed = torch.bincount((shares(noise).flatten() * 100).long(), minlength=100)
    assert chi_squared(observed.tolist(), [N / 100] * 100) < CRITICAL[99]


@pytest.mark.parametrize("neighbour", NEIGHBOURS)
def test_the_noise_of_neighbours_is_independent(neighbour):
    """Pairs of a number and its neighbour fill a grid of 10 x 10 evenly."""
    seed, position, token = NEIGHBOURS[neighbour]
    pairs = [(s, p) for s in range(20) for p in range(10)]  # 200 rows of 100 tokens
    beside = [(s + seed, p + position) for s, p in pairs]
    one, other = (
        exponential_noise(*zip(*rows, strict=True), 5000, torch.device("cpu")) for rows in (pairs, beside)
    )
    a, b = (shares(x) * 10 for x in (one[:, :100], other[:, token : token + 100]))
    cells = (a.long() * 10 + b.long()).flatten()
    assert chi_squared(torch.bincount(cells, minlength=100).tolist(), [N / 100] * 100) < CRITICAL[99]


def test_the_smallest_noise_is_as_small_as_it_should_be():
    """The smallest of V exponential numbers is exponential with mean 1 / V: who is drawn hangs on it."""
    V, rows = 4096, 1000
    noise = exponential_noise(range(rows), [3] * rows, V, torch.device("cpu")).amin(-1)
    observed = torch.bincount((shares(noise * V) * 10).long(), minlength=10)
    assert chi_squared(observed.tolist(), [rows / 10] * 10) < CRITICAL[9]


def test_the_noise_of_a_row_does_not_depend_on_the_rows_beside_it():
    cpu = torch.device("cpu")
    many = exponential_noise(range(40), [5] * 40, 3000, cpu)
    assert torch.equal(many[17:18], exponential_noise([17], [5], 3000, cpu))
    assert torch.equal(many[:, :100], exponential_noise(range(40), [5] * 40, 100, cpu)), "nor on V"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_draws_as_a_cpu_does():
    probs = torch.softmax(reference.random_logits(64, 50_257, 3, scale=2.0), -1)
    ask = range(64), [9] * 64
    noise = [exponential_noise(*ask, 50_257, torch.device(name)).cpu() for name in ("cpu", "cuda")]
    torch.testing.assert_close(*noise, rtol=1e-6, atol=0)
    assert torch.equal(draw(probs.cuda(), *ask).cpu(), draw(probs, *ask))


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


def test_a_row_of_nan_names_no_token_that_does_not_exist():
    tokens = draw(torch.full((2, 10), torch.nan), [1, 2], [0, 0])
    assert (tokens >= 0).all()
    assert (tokens < 10).all()


def test_an_error_in_the_probabilities_seldom_changes_a_draw():
    """On a ruler of cumulative probabilities an error moves all edges behind it: over 50 would change."""
    logits = reference.random_logits(2000, 4096, 0, scale=2.5)
    errors = reference.random_logits(2000, 4096, 1, scale=3e-4)
    one, other = (draw(x.softmax(-1), range(2000), [0] * 2000) for x in (logits, logits + errors))
    assert (one != other).sum() <= 3, (
        "an error of 3e-4 in the logits moves each token by 3e-4 of its own time"
    )


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


# --- the hashes, in Python's own numbers, which do not overflow ---

SPLITMIX64 = [6457827717110365317, 3203168211198807973, 9817491932198370423]  # published, of seed 1234567
GOLDEN = 0x9E3779B97F4A7C15


def lowbias32(x: int, first: int, second: int) -> int:
    """Each product and each sum of the two multiplications is cut to 32 bits."""
    x = (x ^ first) * 0x21F0AAAD % 2**32
    x = ((x ^ x >> 15) + second) % 2**32 * 0x735A2D97 % 2**32
    return x ^ x >> 15


def test_keys_are_those_of_splitmix64():
    states = [(1234567 + (i + 1) * GOLDEN) % 2**64 for i in range(3)]
    assert [_mix(state) for state in states] == SPLITMIX64, "each step of the published hash is there"
    for seed, position in ((0, 0), (42, 1), (-1, 777), (2**63 - 1, 2**17)):
        state = _mix(seed % 2**64) + (position + 1) * GOLDEN
        assert _key(seed, position) == _mix(state % 2**64), (
            "a seed begins a sequence of its own, and a position counts along it"
        )
        assert uniform(seed, position) == (_key(seed, position) >> 11) / 2**53, "the upper 53 bits of the key"


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (42, 1), (-1, 777), (2**63 - 1, 2**17)])
def test_noise_is_the_cited_hash_of_key_and_token(seed, position):
    """So a seed has one text, whichever device and however many rows computed it."""
    high, low = divmod(_key(seed, position), 2**32)
    hashes = [lowbias32(lowbias32(id, 0, 0), low, high) for id in range(500)]
    signed = [number - 2**32 if number >= 2**31 else number for number in hashes]
    want = [-math.log((number + 2**31 + 0.5) / 2**32) for number in signed]
    got = exponential_noise([seed], [position], 500, CPU)[0].tolist()
    assert got == pytest.approx(want, rel=1e-6), "each step of the cited hash is there, in 32 bits"
