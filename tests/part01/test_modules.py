"""`weights.Module` is quicker than nn.Module, and does what nn.Module does."""

import copy

import pytest
import torch
from torch import nn

from engine.attention.dense import causal
from engine.models.loader import load_model
from engine.models.weights import Embedding, LayerNorm, Linear, Module


class Pair(Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Linear(3, 3), Linear(3, 3, bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(parameter.numel()))

    def forward(self, x):
        return self.other(self.one(x))


X = torch.tensor([[1.0, -2.0, 3.0]])


@pytest.mark.parametrize("when", ["before", "after"])
def test_whoever_hooks_in_is_called_until_the_hook_is_removed(when):
    pair, called = Pair(), []
    hook_in = pair.one.register_forward_pre_hook if when == "before" else pair.one.register_forward_hook
    handle = hook_in(lambda *_: called.append(when))
    pair(X)
    assert called == [when], "a hook of either kind is called, once a call"
    handle.remove()
    pair(X)
    assert called == [when], "a hook that is removed is called no more"


def test_what_a_hook_gives_back_counts():
    pair = Pair()
    pair.register_forward_hook(lambda module, given, out: out * 0)
    assert torch.equal(pair(X), torch.zeros(1, 3))


def test_arguments_may_be_named(tiny_gpt2):
    model, ids = load_model(tiny_gpt2), torch.tensor([1, 2, 3])
    with torch.inference_mode():
        named = model(token_ids=ids, positions=torch.arange(3), attend=causal)
        assert torch.equal(named, model(ids, torch.arange(3), causal))


def test_a_hook_hears_of_named_arguments():
    pair, heard = Pair(), []
    pair.register_forward_pre_hook(lambda module, args, options: heard.append(options), with_kwargs=True)
    pair(x=X)
    assert [list(options) for options in heard] == [["x"]]


def test_a_layer_that_is_replaced_is_the_one_that_is_called():
    pair, new = Pair(), Linear(3, 3)
    nn.init.zeros_(new.weight), nn.init.ones_(new.bias)
    pair.other = new
    assert torch.equal(pair(X), torch.ones(1, 3))
    assert dict(pair.named_modules())["other"] is pair.other is new
    assert pair.get_parameter("other.bias") is pair.other.bias is new.bias


def test_what_is_taken_away_is_gone():
    pair = Pair()
    pair.one.bias = None
    assert pair.one.bias is None, "a weight set to None is still there"
    assert [name for name, _ in pair.named_parameters()] == ["one.weight", "other.weight"]
    del pair.other
    assert not hasattr(pair, "other"), "a layer that was deleted is still there"


def test_a_model_that_is_moved_has_its_weights_there():
    pair = Pair().to("meta")
    assert {p.device.type for p in (pair.one.weight, pair.one.bias, pair.other.weight)} == {"meta"}
    assert pair.one.weight is pair.get_parameter("one.weight"), "moved weights are new objects"


def test_a_model_changes_its_precision_as_a_whole(tiny_gpt2):
    model = load_model(tiny_gpt2).double()
    assert model.blocks[0].mlp.up.weight.dtype == torch.float64
    assert model.blocks[0].norm1.weight is model.get_parameter("blocks.0.norm1.weight")


def test_a_copy_has_weights_of_its_own():
    pair = Pair()
    other = copy.deepcopy(pair)
    nn.init.zeros_(other.one.weight)
    assert other.one.weight is other.get_parameter("one.weight")
    assert pair.one.weight.abs().sum() > 0


@pytest.mark.parametrize(
    ("ours", "theirs", "x"),
    [
        (Linear(3, 2), nn.Linear(3, 2), X),
        (Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False), X),
        (LayerNorm(3, 1e-3), nn.LayerNorm(3, 1e-3), X),
        (Embedding(5, 3), nn.Embedding(5, 3), torch.tensor([4, 0, 4])),
    ],
    ids=["linear", "without bias", "norm", "embedding"],
)
@torch.inference_mode()
def test_each_layer_computes_what_torchs_does(ours, theirs, x):
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours(x), theirs(x))
