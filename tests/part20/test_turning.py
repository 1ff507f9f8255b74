"""`rotate`, by hand: which numbers are a pair, which way they turn, and whose angle is whose."""

import math

import torch

from engine.models.rope import rotate


def angles(*turns: tuple[float, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Degrees of each token's pairs -> cosines and sines, [T, 1, Dh/2] each."""
    radians = torch.tensor(turns).double()[:, None] * math.pi / 180
    return radians.cos().float(), radians.sin().float()


def turned(x, *turns: tuple[float, ...]) -> list:
    return rotate(torch.tensor(x), angles(*turns)).round(decimals=5).add(0.0).tolist()


def test_a_quarter_turn():
    rule = "a turn by 90° takes (a, b) to (-b, a)"
    assert turned([[[1.0, 0.0]]], (90,)) == [[[0.0, 1.0]]], rule
    assert turned([[[3.0, 2.0]]], (90,)) == [[[-2.0, 3.0]]], rule


def test_which_numbers_are_a_pair():
    """(1, 3) is turned by 90°, (2, 4) is not."""
    got = turned([[[1.0, 2.0, 3.0, 4.0]]], (90, 0))
    assert got == [[[-3.0, 2.0, 1.0, 4.0]]], (
        "a pair is number i and number i + Dh/2, and each stays at its place"
    )


def test_each_pair_has_its_own_angle():
    got = turned([[[1.0, 2.0, 3.0, 4.0]]], (180, 90))
    assert got == [[[-1.0, -4.0, -3.0, 2.0]]], "pair i turns by angle i"


def test_every_head_of_a_token_turns_by_that_tokens_angle():
    x = [[[1.0, 0.0], [0.0, 2.0]], [[1.0, 0.0], [0.0, 2.0]]]  # two tokens, two heads each
    first, second = turned(x, (0,), (90,))
    assert first == [[1.0, 0.0], [0.0, 2.0]], "each token turns by its own angle: the first by 0°"
    assert second == [[0.0, 1.0], [-2.0, 0.0]], "each token turns by its own angle: the second by 90°"


def test_lengths_stay_and_so_does_x():
    x = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0))
    before = x.clone()
    got = rotate(x, angles(*[(10.0, 70.0, 130.0, 200.0)] * 3))
    torch.testing.assert_close(got.norm(dim=-1), x.norm(dim=-1), msg="a turn changes no length")
    assert torch.equal(x, before), "x itself is not written to: it is a view of the layer's output"


def test_the_dtype_stays():
    for dtype in (torch.bfloat16, torch.float16):
        cos, sin = (part.to(dtype) for part in angles((30.0,)))
        assert rotate(torch.ones(1, 1, 2, dtype=dtype), (cos, sin)).dtype == dtype, "the dtype stays"
