"""Packed weights compute what nn.Linear computes, and are used only where nothing is lost."""

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
from tests.part03.linears import linear, needs_fbgemm, needs_mkldnn, timed

each_form = pytest.mark.parametrize(
    "form",
    [
        pytest.param(Half, marks=needs_fbgemm),
        pytest.param(SharedHalf, marks=needs_fbgemm),
        Transposed,
        pytest.param(Blocked, marks=needs_mkldnn),
    ],
)


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


@pytest.mark.parametrize(("seconds", "num_passes"), [(1.0, 3), (0.005, 6), (0.0, 10)])
def test_a_measurement_ends_when_it_has_taken_long_enough(monkeypatch, seconds, num_passes):
    """At least three passes, at most ten, and between them until 0.03 seconds are over."""

    class Layer(nn.Linear):
        def forward(self, x):
            clock.append(clock[-1] + seconds)
            return x

    clock = [0.0]
    monkeypatch.setattr(packed_linear.time, "perf_counter", lambda: clock[-1])
    layer = Layer(8, 8)
    assert packed_linear._seconds_per_layer([layer], [layer], rows=1) == [pytest.approx(seconds)]
    assert len(clock) - 1 == num_passes


@needs_mkldnn
@pytest.mark.parametrize(("rows", "forms"), [(1, [Transposed]), (2, [Transposed] + [Blocked] * 7)])
def test_two_rows_are_enough_for_a_second_form(monkeypatch, rows, forms):
    pace = {Transposed: lambda rows: rows**2, Blocked: lambda rows: 2}
    timed(monkeypatch, lambda form, rows: pace.get(form, lambda rows: 1e9)(rows))
    (layer,) = pack_linears(nn.Sequential(linear(8, 8, half=False)), rows)
    got = [type(form) for form in (layer.by_size if isinstance(layer, ByRows) else [layer])]
    assert got == forms, "a single row has one form, two rows have a second form that is faster for one"


@needs_fbgemm
def test_a_torch_without_fbgemms_functions_still_has_the_shared_form(monkeypatch):
    """Torch has announced that it will remove the functions which `Half` calls."""
    monkeypatch.delattr(torch, "fbgemm_linear_fp16_weight_fp32_activation")
    assert not Half.can_pack(linear())
    assert SharedHalf.can_pack(linear())
