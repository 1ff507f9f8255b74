"""Linear layers are replaced by others that compute the same: every one once, inside wrappers too."""

import copy

import torch
from torch import nn

from engine.layers.packed_linear import Blocked, pack_linears
from engine.layers.replace import linear_names, replace_linears
from engine.models.loader import load_model
from tests.part03.linears import linear, needs_mkldnn, timed


def test_replacing_touches_every_linear_layer_once_and_nothing_else(tiny_gpt2):
    model = load_model(tiny_gpt2)
    before = dict(model.named_modules())
    asked = []

    def make(name, layer):
        asked.append((name, layer))
        return nn.Sequential(copy.copy(layer))

    names = linear_names(model)
    assert len(names) == 2 * 4 + 1
    assert names[-1] == "head"
    assert replace_linears(model, make) is model
    assert asked == [(name, before[name]) for name in names]
    assert all(isinstance(model.get_submodule(name), nn.Sequential) for name in names)
    assert model.embed is before["embed"]
    assert model.blocks[1].norm2 is before["blocks.1.norm2"]


@needs_mkldnn
def test_a_tied_embedding_keeps_its_weight_when_the_head_is_packed(tiny_gpt2):
    model = load_model(tiny_gpt2)
    weight = model.embed.weight
    replace_linears(model, lambda name, linear: Blocked(linear))
    assert isinstance(model.head, Blocked)
    assert model.embed.weight is weight
    assert torch.equal(model.embed(torch.tensor([5])), weight[[5]])


class Adapted(nn.Module):
    """As Part 18 will: the layer it wraps, and a term of its own, for every layer but the head."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.base = linear
        self.down = torch.ones(linear.in_features, 1) / 16  # plain tensors: no linear layers of their own

    def forward(self, x):
        return self.base(x) + x @ self.down


class Quantized(nn.Module):
    """As Part 17 will: no nn.Linear, but a linear layer all the same."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.steps = (linear.weight * 64).round().to(torch.int8)

    def forward(self, x):
        return x @ (self.steps.float() / 64).T


@needs_mkldnn
@torch.inference_mode()
def test_a_wrapper_that_is_a_linear_layer_itself_stays_and_what_it_wraps_is_packed(monkeypatch):
    """As most of LoRA's wrappers are: they say `in_features`, so they are found, and so is what is inside."""
    timed(monkeypatch, lambda form, rows: 0.5 if form is Blocked else 1.0)

    class Telling(Adapted):
        def __init__(self, linear):
            super().__init__(linear)
            self.in_features, self.out_features = linear.in_features, linear.out_features

    model = nn.Sequential(linear(8, 8), linear(8, 8, seed=1))
    replace_linears(model, lambda name, layer: Telling(layer) if name == "1" else layer)
    assert linear_names(model) == ["0", "1", "1.base"]
    before, x = list(model), torch.randn(3, 8)
    expected = model(x)
    pack_linears(model)
    assert model[1] is before[1]
    assert [type(model[0]), type(model[1].base)] == [Blocked, Blocked]
    torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_a_wrapper_can_be_wrapped():
    """What is inside a layer that has just been replaced is not asked about: it belongs to the new one."""

    class Telling(Adapted):
        def __init__(self, linear):
            super().__init__(linear)
            self.in_features, self.out_features = linear.in_features, linear.out_features

    model = nn.Sequential(linear(8, 8), linear(8, 8, seed=1))
    replace_linears(model, lambda name, layer: Telling(layer))
    before, asked = list(model), []

    def wrap(name, layer):
        asked.append(name)
        return nn.Sequential(layer) if name == "0" else layer

    replace_linears(model, wrap)
    assert asked == ["0", "1", "1.base"]
    assert type(model[0]) is nn.Sequential
    assert model[0][0] is before[0]
    assert model[1] is before[1]


@needs_mkldnn
@torch.inference_mode()
def test_merge_quantize_wrap_pack_is_the_order(monkeypatch):
    timed(monkeypatch, lambda form, rows: 0.5 if form is Blocked else 1.0)
    model = nn.ModuleDict({"first": linear(8, 8), "second": linear(8, 8, seed=1), "head": linear(8, 4)})
    x = torch.randn(3, 8)

    def quantize(name, layer):
        return Quantized(layer) if name == "first" else layer

    def wrap(name, layer):
        return layer if name == "head" else Adapted(layer)

    replace_linears(replace_linears(model, quantize), wrap)
    before = [layer(x) for layer in model.values()]
    pack_linears(model)
    assert [type(model[name]) for name in model] == [Adapted, Adapted, Blocked], "wrappers stay"
    assert type(model["first"].base) is Quantized, "a quantized layer is not packed"
    assert type(model["second"].base) is Blocked, "the layer inside a wrapper is packed"
    for layer, expected in zip(model.values(), before, strict=True):
        torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-5)
