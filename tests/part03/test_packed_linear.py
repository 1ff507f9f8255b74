"""Packed weights compute what nn.Linear computes, and are used only where nothing is lost."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

from engine.cache.single import CachedForward
from engine.decoding.greedy import generate
from engine.decoding.params import SamplingParams
from engine.layers import packed_linear
from engine.layers.packed_linear import Blocked, ByRows, Half, SharedHalf, Transposed, pack_linears
from engine.layers.replace import linear_names, replace_linears
from engine.models.checkpoint import ZOO
from engine.models.loader import load_model

needs_fbgemm = pytest.mark.skipif(
    torch.backends.quantized.engine not in ("x86", "fbgemm"), reason="fp16 packing is FBGEMM's, for x86 alone"
)
needs_mkldnn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="blocked weights are oneDNN's"
)
each_form = pytest.mark.parametrize(
    "form",
    [
        pytest.param(Half, marks=needs_fbgemm),
        pytest.param(SharedHalf, marks=needs_fbgemm),
        Transposed,
        pytest.param(Blocked, marks=needs_mkldnn),
    ],
)


def linear(inputs=24, outputs=40, bias=True, half=True, seed=0) -> nn.Linear:
    torch.manual_seed(seed)
    made = nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)
    if half:
        made.weight.copy_(made.weight.half())
    return made


def output(model, tokenizer, prompt, count=60):
    params = SamplingParams(temperature=0, max_tokens=count)
    return generate(CachedForward(model), tokenizer, model.config, prompt, params).outputs[0].token_ids


@each_form
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 64])
@torch.inference_mode()
def test_a_packed_layer_gives_the_linear_layers_result(form, bias, rows):
    original = linear(bias=bias)
    x = torch.randn(rows, 24)
    packed = form(original)
    torch.testing.assert_close(packed(x), original(x), atol=1e-5, rtol=1e-5)


@needs_fbgemm
@torch.inference_mode()
def test_the_smallest_and_largest_half_precision_weights_survive_packing():
    original = linear(4, 3, bias=False)
    original.weight.copy_(
        torch.tensor(
            [[6e-8, -6e-8, 1e-6, 3e-5], [65504.0, -65504.0, 1.0, 0.0], [6.1e-5, 5e-7, -0.0, 2.0]]
        ).half()
    )
    assert Half.can_pack(original)
    for x in torch.eye(4):
        torch.testing.assert_close(Half(original)(x[None]), original(x[None]), atol=0, rtol=1e-6)


@pytest.fixture(scope="module")
def stories(trained) -> dict[str, list[int]]:
    """What the model tells when nothing is packed."""
    model, tokenizer, _ = trained
    return {
        prompt: output(model, tokenizer, prompt) for prompt in ("Once upon a time", "Lily had a red ball.")
    }


@each_form
def test_greedy_tokens_and_logits_are_the_same_with_every_layer_packed(trained, checkpoint, form, stories):
    model, tokenizer, _ = trained
    packed = load_model(checkpoint)
    if not all(form.can_pack(packed.get_submodule(name)) for name in linear_names(packed)):
        pytest.skip(f"{checkpoint} is not made of half-precision weights")
    replace_linears(packed, lambda name, linear: form(linear))
    for prompt, told in stories.items():
        assert output(packed, tokenizer, prompt) == told
    ids = torch.randint(
        3, model.config.vocab_size, (64,), generator=torch.Generator().manual_seed(0)
    ).tolist()
    one, other = CachedForward(model), CachedForward(packed)
    for end in (32, 33, 64):
        assert (one(ids[:end]) - other(ids[:end])).abs().max() <= 1e-4


def test_packing_at_load_gives_the_same_tokens(trained, checkpoint):
    model, tokenizer, _ = trained
    packed = load_model(checkpoint, transform=pack_linears)
    assert output(packed, tokenizer, "The little bird") == output(model, tokenizer, "The little bird")
    assert not packed.training


@pytest.mark.parametrize(
    "weight", [1 / 3, 1e-9, 70000.0, 2049.0], ids=["rounded", "too small", "too large", "no such number"]
)
def test_weights_that_half_precision_cannot_hold_are_not_packed_in_it(weight):
    original = linear()
    original.weight[3, 5] = weight
    assert not Half.can_pack(original)


@needs_fbgemm
def test_a_bias_that_half_precision_cannot_hold_does_not_matter():
    original = linear()
    original.bias[0] = 1 / 3
    assert Half.can_pack(original)
    x = torch.zeros(1, 24)
    assert torch.equal(Half(original)(x), original(x))


@pytest.mark.parametrize("form", [Half, SharedHalf, Transposed, Blocked])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_only_single_precision_is_packed(form, dtype):
    assert not form.can_pack(linear().to(dtype))


@pytest.mark.parametrize("form", [Half, SharedHalf, Transposed, Blocked])
def test_weights_on_another_device_are_not_packed(form):
    assert not form.can_pack(linear().to("meta"))


def test_one_layer_that_would_lose_something_keeps_all_from_half_precision(monkeypatch):
    # Whatever the processor, half precision is the fastest here.
    timed(monkeypatch, lambda form, rows: 0.0 if form is Half else 1.0)
    model = nn.Sequential(linear(8, 8), linear(8, 8, half=False))
    pack_linears(model)
    assert not any(isinstance(module, Half) for module in model)


@pytest.mark.parametrize(
    "fastest",
    [
        nn.Linear,
        Transposed,
        pytest.param(Half, marks=needs_fbgemm),
        pytest.param(Blocked, marks=needs_mkldnn),
    ],
)
def test_the_fastest_form_is_kept_for_every_layer(monkeypatch, fastest):
    timed(monkeypatch, lambda form, rows: 0.5 if form is fastest else 1.0)
    model = pack_linears(nn.Sequential(linear(8, 8), nn.ReLU(), linear(8, 4)))
    assert [type(module) for module in model] == [fastest, nn.ReLU, fastest]


def timed(monkeypatch, seconds):
    """Packing is told how long each form takes for a layer: seconds(form, rows)."""
    monkeypatch.setattr(
        packed_linear,
        "_seconds_per_layer",
        lambda linears, made, rows: [seconds(type(layer), rows) for layer in made],
    )


@needs_mkldnn
@torch.inference_mode()
def test_two_forms_share_the_work_by_the_number_of_rows(monkeypatch):
    pace = {Transposed: lambda rows: rows, Blocked: lambda rows: 3 + rows / 2}  # even at 6 rows
    timed(monkeypatch, lambda form, rows: pace.get(form, lambda rows: 1e9)(rows))
    layers = [linear(8, 8, half=False), linear(8, 4, half=False, seed=1)]
    packed = pack_linears(nn.Sequential(*layers), rows=16)
    for layer, original in zip(packed, layers, strict=True):
        assert type(layer) is ByRows
        assert [type(form) for form in layer.by_size] == [Transposed] * 3 + [Blocked] * 5
        served = {}
        for form in {*layer.by_size}:
            form.register_forward_pre_hook(
                lambda form, args, served=served: served.update({len(args[0]): type(form)})
            )
        for rows in (1, 2, 3, 4, 7, 8, 100, 1000):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(layer(x), original(x), atol=1e-5, rtol=1e-5)
        few = dict.fromkeys((1, 2, 3, 4, 7), Transposed)
        assert served == few | dict.fromkeys((8, 100, 1000), Blocked), "each form where it is the faster"


@needs_fbgemm
@needs_mkldnn
def test_the_cheaper_form_serves_each_number_of_rows_and_equals_stay_with_the_one_for_many(monkeypatch):
    """What full precision loses in use counts: 4 rows take 4.5, and 1.15 times 4."""
    pace = {
        Half: {1: 1, 2: 3, 4: 4.5, 8: 9, 16: 1.15 * 4},
        Blocked: {1: 4, 2: 4, 4: 4, 8: 4, 16: 4, 32: 1, 64: 1, 128: 1},
    }
    timed(monkeypatch, lambda form, rows: pace.get(form, {}).get(rows, 1e9))
    (layer,) = pack_linears(nn.Sequential(linear(8, 8)), rows=128)
    assert [type(form) for form in layer.by_size] == [Half] * 3 + [Blocked] * 5


@needs_mkldnn
@torch.inference_mode()
def test_a_number_of_rows_goes_to_the_form_of_its_size():
    """by_size[i] serves 2**i rows and more, the last one all there are beyond."""
    given = []

    class Noting(nn.Module):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def forward(self, x):
            given.append((len(x), self.name))
            return x

    layer = ByRows([Noting(name) for name in "abc"])
    for rows in (1, 2, 3, 4, 5, 7, 8, 1000):
        layer(torch.zeros(rows, 8))
    assert given == [(1, "a"), (2, "b"), (3, "b"), (4, "c"), (5, "c"), (7, "c"), (8, "c"), (1000, "c")]


@needs_mkldnn
@pytest.mark.parametrize(("gain", "forms"), [(0.95, Blocked), (0.5, ByRows)])
def test_a_second_form_must_be_worth_its_memory(monkeypatch, gain, forms):
    timed(
        monkeypatch,
        lambda form, rows: {Transposed: gain if rows == 1 else 2, Blocked: 1}.get(form, 9),
    )
    assert {type(layer) for layer in pack_linears(nn.Sequential(linear(8, 8, half=False)), 16)} == {forms}


@needs_mkldnn
@torch.inference_mode()
def test_each_shape_has_the_form_that_is_fastest_for_it(monkeypatch):
    """Wide layers are fastest transposed, deep ones as they are, at one row; all of them blocked at many."""

    def seconds(linears, made, rows):
        return [time_of(linear, type(layer), rows) for linear, layer in zip(linears, made, strict=True)]

    def time_of(linear, form, rows):
        best = Transposed if linear.out_features > linear.in_features else nn.Linear
        if rows > 1 or linear.out_features == linear.in_features:
            best = Blocked
        return 0.5 if form is best else 1.0

    monkeypatch.setattr(packed_linear, "_seconds_per_layer", seconds)
    shapes = [(8, 24), (24, 8), (8, 24)]
    layers = [linear(*shape, half=False, seed=seed) for seed, shape in enumerate(shapes)]
    packed = pack_linears(nn.Sequential(*layers))
    assert [type(layer) for layer in packed] == [Transposed, nn.Linear, Transposed]
    packed = pack_linears(nn.Sequential(*layers), rows=16)
    assert [type(layer.by_size[0]) for layer in packed] == [Transposed, nn.Linear, Transposed]
    assert {type(form) for layer in packed for form in layer.by_size[1:]} == {Blocked}
    square = pack_linears(nn.Sequential(linear(8, 8, half=False), *layers), rows=16)[0]
    assert isinstance(square, Transposed | Blocked | nn.Linear), (
        "where one form serves all rows, it stands alone"
    )
    for layer, original in zip(packed, layers, strict=True):
        for rows in (1, 16):
            x = torch.randn(rows, original.in_features)
            torch.testing.assert_close(layer(x), original(x), atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_a_shapes_time_is_that_of_all_its_layers_in_a_step(monkeypatch):
    """A form that is a little faster for one of two layers, and much slower for the other, has lost."""
    took = {nn.Linear: [1.0, 1.0], Transposed: [1.2, 0.9]}
    monkeypatch.setattr(packed_linear, "FORMS", (Transposed,))
    monkeypatch.setattr(packed_linear, "_seconds_per_layer", lambda linears, made, rows: took[type(made[0])])
    packed = pack_linears(nn.Sequential(linear(8, 8, half=False), linear(8, 8, half=False, seed=1)))
    assert [type(layer) for layer in packed] == [nn.Linear, nn.Linear]


@needs_fbgemm
@needs_mkldnn
@pytest.mark.parametrize(("half", "winner"), [(1.1, Half), (1.2, Blocked)])
def test_weights_in_full_precision_must_win_by_what_they_lose_in_use(monkeypatch, half, winner):
    timed(monkeypatch, lambda form, rows: {Half: half, Blocked: 1}.get(form, 9))
    assert {type(layer) for layer in pack_linears(nn.Sequential(linear(8, 8)))} == {winner}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_in_half_precision_is_left_alone(dtype):
    model = nn.Sequential(linear(8, 8), linear(8, 8)).to(dtype)
    layers = list(model)
    assert list(pack_linears(model)) == layers


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


def test_packing_warns_of_nothing_and_leaves_its_hosts_filters_alone():
    """In a process of its own: torch warns of what will go one day at the first call, and then no more."""
    code = """
import warnings, torch
warnings.simplefilter("error")
before = list(warnings.filters)
from engine.layers.packed_linear import pack_linears
linear = torch.nn.Linear(8, 8)
linear.weight.data = linear.weight.data.half().float()
pack_linears(torch.nn.Sequential(linear))
assert warnings.filters == before
"""
    subprocess.run([sys.executable, "-c", code], cwd=ZOO.parents[1], check=True)
