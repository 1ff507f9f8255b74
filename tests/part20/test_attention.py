"""`Attention.forward`, by hand: what `attend` is handed, and what is done with what it gives back."""

import pytest
import torch

from engine.models.llama import Attention, LlamaConfig

Hq, Hkv, Dh, D = 4, 2, 2, 3
STRAIGHT, QUARTER = (1.0, 0.0), (0.0, 1.0)  # cosine and sine of 0° and of 90°


def made(qk_norm: bool = False, layer: int = 3) -> Attention:
    """Row i of its `qkv` gives 10 · i + 1 for x = (1, 0, 0), and 20 · i + 2 for (2, 0, 0)."""
    config = LlamaConfig(
        model_type="llama", vocab_size=1, hidden_size=D, num_layers=1, num_heads=Hq, num_kv_heads=Hkv,
        head_dim=Dh, intermediate_size=1, max_positions=8, norm_eps=0.0, activation="silu",
        tie_word_embeddings=True, dtype="float32", raw={}, qk_norm=qk_norm,
    )  # fmt: skip
    attention = Attention(layer, config).requires_grad_(False)
    attention.qkv.weight.zero_()
    attention.qkv.weight[:, 0] = 10.0 * torch.arange((Hq + 2 * Hkv) * Dh) + 1
    attention.proj.weight.copy_(torch.arange(1.0, Hq * Dh + 1).repeat(D, 1))
    return attention


class Seen:
    """An `attend` that keeps what it was handed, and finds nothing but zeros."""

    def __call__(self, layer, q, k, v):
        self.layer, self.q, self.k, self.v = layer, q.clone(), k.clone(), v.clone()
        return torch.zeros(len(q), Hq, Dh)


def seen(attention: Attention, turn: tuple[float, float] = STRAIGHT, tokens: int = 1) -> Seen:
    attend = Seen()
    x = torch.zeros(tokens, D)
    x[:, 0] = torch.arange(1.0, tokens + 1)
    attention(x, tuple(torch.full((tokens, 1, Dh // 2), part) for part in turn), attend)
    return attend


def test_how_many_heads_attend_is_handed():
    got = seen(made(), tokens=5)
    assert got.q.shape == (5, Hq, Dh), "queries are [T, Hq, Dh]"
    assert got.k.shape == got.v.shape == (5, Hkv, Dh), (
        "keys and values are [T, Hkv, Dh]: not repeated, or the cache would hold each several times"
    )


def test_which_rows_are_whose():
    got = seen(made())
    assert got.q.tolist() == [[[1, 11], [21, 31], [41, 51], [61, 71]]], (
        "rows 0 to 7 of qkv are the queries, as they come: attend divides by √Dh"
    )
    assert got.k.tolist() == [[[81, 91], [101, 111]]], "rows 8 to 11 of qkv are the keys"
    assert got.v.tolist() == [[[121, 131], [141, 151]]], "rows 12 to 15 of qkv are the values"


def test_each_token_has_its_own():
    got = seen(made(), tokens=2)
    assert got.k[1].tolist() == [[162, 182], [202, 222]], "the second token's keys are made of its own x"


def test_the_layer_is_named():
    assert seen(made(layer=3)).layer == 3, "attend is told which layer asks: each has its own keys and values"


def test_queries_and_keys_are_turned_and_values_are_not():
    """A quarter turn takes (a, b) to (-b, a)."""
    got = seen(made(), QUARTER)
    assert got.q[0, 0].tolist() == [-11, 1], "queries are turned"
    assert got.k[0].tolist() == [[-91, 81], [-111, 101]], (
        "keys are turned before they are handed over (and cached)"
    )
    assert got.v[0].tolist() == [[121, 131], [141, 151]], (
        "values are not turned: they are what is read, not where"
    )


def with_norms() -> Attention:
    attention = made(qk_norm=True)
    attention.qkv.weight[:, 0] = torch.tensor([1.0, 7.0]).repeat(Hq + 2 * Hkv)  # its root mean square is 5
    attention.q_norm.weight.copy_(torch.tensor([10.0, 100.0]))
    attention.k_norm.weight.copy_(torch.tensor([1.0, 5.0]))
    return attention


def test_with_norms_queries_and_keys_are_normed_each_by_its_own():
    got = seen(with_norms())
    assert got.q[0, 3].tolist() == pytest.approx([2, 140]), "queries are normed, head by head, by q_norm"
    assert got.k[0, 1].tolist() == pytest.approx([0.2, 7]), "keys are normed, head by head, by k_norm"
    assert got.v[0, 1].tolist() == pytest.approx([1, 7]), "values are not normed"


def test_norms_come_before_the_turn():
    """The weights of a norm belong to places in a head, and a turn mixes two places."""
    got = seen(with_norms(), QUARTER)
    assert got.q[0, 0].tolist() == pytest.approx([-140, 2]), "first normed, then turned"
    assert got.k[0, 0].tolist() == pytest.approx([-7, 0.2]), "first normed, then turned"


def test_what_attend_gives_goes_through_proj_head_after_head():
    """Here it gives 1 to 8 for a token, and a row of proj has the weights 1 to 8: 1 + 4 + 9 + ... + 64."""
    given = torch.arange(1.0, 9).reshape(1, Hq, Dh)
    angles = torch.ones(1, 1, 1), torch.zeros(1, 1, 1)
    out = made()(torch.ones(1, D), angles, lambda layer, q, k, v: given)
    assert out.tolist() == [[204.0] * D], "attend's [T, Hq, Dh] goes through proj, head after head"
