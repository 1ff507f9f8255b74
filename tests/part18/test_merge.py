"""A merged adapter: the weights it says, and PEFT's own logits."""

import pytest
import torch
from torch import nn

from engine.cache.single import CachedForward
from engine.layers.replace import replace_linears
from engine.lora.adapter import Factors, read_adapter
from engine.lora.merge import difference, merge
from engine.models.loader import load_model
from tests.part18.tiny import KINDS, by_hand, their_logits, theirs

IDS = [5, 17, 200, 3, 99, 42, 7]


def test_the_difference_is_scale_times_b_times_a():
    """The numbers of the article: A reads, B writes."""
    A, B = torch.tensor([[1.0, 2.0, 0.0]]), torch.tensor([[3.0], [-1.0]])
    found = difference(Factors(A, B), scale=0.5)
    assert found.shape == (2, 3), "shaped as the weight: [out, in]"
    assert found.tolist() == [[1.5, 3.0, 0.0], [-0.5, -1.0, 0.0]], "scale times B times A"


def test_every_rank_one_term_counts():
    torch.manual_seed(0)
    A, B = torch.randn(3, 5), torch.randn(4, 3)
    by_terms = sum(torch.outer(B[:, i], A[i]) for i in range(3))
    assert torch.allclose(difference(Factors(A, B), 2.0), 2 * by_terms, atol=1e-6), (
        "the sum of r outer products"
    )


def test_what_is_not_named_stays_as_it_is(base):
    model, plain = load_model(base), load_model(base)
    assert merge(model, by_hand(model.config, value=2.0, scale=0.25)) is model
    changed = {
        name for (name, mine), old in zip(model.named_parameters(), plain.parameters(), strict=True)
        if not torch.equal(mine, old)
    }  # fmt: skip
    assert changed == {"blocks.0.mlp.up.weight"}
    assert torch.allclose(model.blocks[0].mlp.up.weight, plain.blocks[0].mlp.up.weight + 1.0)


def test_rows_of_a_fused_layer_are_changed_alone(base):
    """Where query, key and value are one layer, an adapter may be for one of them."""
    model, plain = load_model(base), load_model(base)
    D = model.config.hidden_size
    adapter = by_hand(model.config)
    keys = Factors(torch.ones(1, D), torch.ones(D, 1), slice(D, 2 * D))
    adapter.layers.clear()
    adapter.layers["blocks.1.attention.qkv"] = (keys,)
    merge(model, adapter)
    moved = model.blocks[1].attention.qkv.weight - plain.blocks[1].attention.qkv.weight
    assert moved[D : 2 * D].eq(1).all() or torch.allclose(moved[D : 2 * D], torch.ones(D, D), atol=1e-6)
    assert not moved[:D].any()
    assert not moved[2 * D :].any()


def test_a_weight_in_half_precision_is_rounded_once(base):
    """In bf16, 1 + 1/256 is half way and becomes 1. A little more than 1/256 goes up, unless it was
    rounded to 1/256 before.
    """
    model = load_model(base, dtype="bfloat16")
    up = model.blocks[0].mlp.up.weight
    up.fill_(1.0)
    merge(model, by_hand(model.config, value=1 / 16, scale=1 + 2**-10))
    assert torch.equal(up, torch.full_like(up, 1 + 1 / 128)), "added in fp32, then rounded"


def test_layers_that_are_no_plain_ones_any_more_are_refused(base):
    model = load_model(base)
    replace_linears(model, lambda name, linear: nn.Sequential(linear))
    with pytest.raises(ValueError, match=r"blocks\.0\.mlp\.up is Sequential: merge before"):
        merge(model, by_hand(model.config))


@pytest.mark.parametrize("name", KINDS)
def test_merged_at_load_gives_pefts_logits_merged_and_unmerged(base, adapters, name):
    model = load_model(base, transform=lambda m: merge(m, read_adapter(adapters[name], m.config)))
    mine = torch.stack([CachedForward(model)(IDS[: i + 1]) for i in range(len(IDS))])
    for merged in (True, False):
        want = their_logits(theirs(base, adapters[name], merged), IDS)
        assert (mine - want).abs().max() <= 1e-4
    assert (mine - their_logits(theirs(base), IDS)).abs().max() > 0.1, "it makes a difference"
