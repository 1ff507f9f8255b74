"""The trial passes: masks, arguments of the attention, and sequences that change each other."""

import pytest
import torch
from torch import nn

from engine.models.checkpoint import CheckpointError
from engine.models.loader import load_model
from engine.models.transformers_attention import extras_of, needs_extras
from engine.models.transformers_mask import NEAR, window_of
from engine.models.transformers_survey import refuse_leaks
from tests.partC.families import make

LAST = 40
MASKS = {
    "causal": (lambda b, h, q, k: k <= q, None),
    "a window": (lambda b, h, q, k: (k <= q) & (k > q - 5), 5),
    "a window of itself": (lambda b, h, q, k: k == q, 1),
    "a wide window": (lambda b, h, q, k: (k <= q) & (k > q - 30), 30),
    "a window past the last token": (lambda b, h, q, k: (k <= q) & (k > q - 99), None),
}
ODD_MASKS = {
    "both ways": lambda b, h, q, k: k >= 0,
    "chunks": lambda b, h, q, k: (k <= q) & (k // 16 == q // 16),
    "all but its own": lambda b, h, q, k: k < q,
    "every other": lambda b, h, q, k: (k <= q) & ((q - k) % 2 == 0),
    "a prefix for all": lambda b, h, q, k: (k <= q) | (k < 4),
}


@pytest.mark.parametrize("name", MASKS)
def test_the_window_is_read_from_a_mask(name):
    mask, window = MASKS[name]
    assert window_of(mask, LAST) == window


def test_a_mask_of_a_billion_positions_takes_no_memory():
    assert window_of(MASKS["a window"][0], 10**9) == 5
    assert window_of(MASKS["causal"][0], 10**9) is None


@pytest.mark.parametrize("name", ODD_MASKS)
def test_a_mask_of_another_kind_is_refused(name):
    with pytest.raises(CheckpointError, match=r"position \d+ sees other positions than those before it"):
        window_of(ODD_MASKS[name], LAST)


def test_what_a_layer_wants_is_passed_on():
    sinks = torch.ones(4)
    extras = extras_of({"scaling": 0.5, "softcap": 30.0, "s_aux": sinks, "dropout": 0.0}, 16, 8)
    assert (extras.scale, extras.softcap, extras.window) == (0.5, 30.0, 8)
    assert extras.sinks is sinks
    assert needs_extras(extras)


def test_a_scale_alone_needs_no_other_attention():
    assert extras_of({"scaling": 16**-0.5}, 16, None).names() == []
    assert not needs_extras(extras_of({"scaling": 1.0}, 16, None))


@pytest.mark.parametrize(
    "option", [{"position_bias": torch.ones(1)}, {"dropout": 0.1}, {"is_causal": False}, {"unheard_of": 1}]
)
def test_an_argument_that_could_change_the_result_is_refused_by_name(option):
    with pytest.raises(ValueError, match=f"the attention's argument '?{next(iter(option))}"):
        extras_of(option, 16, None)


class Shifted(nn.Module):
    """Adds to each token's result that of the token before, as a convolution over tokens would."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden):
        out = self.inner(hidden)
        return out + out.roll(1, dims=1)


def test_a_model_in_which_sequences_change_each_other_is_refused(tmp_path):
    make("Granite", tmp_path)
    model = load_model(tmp_path)
    refuse_leaks(model)
    model.body.layers[0].mlp = Shifted(model.body.layers[0].mlp)
    with pytest.raises(CheckpointError, match="tokens of a sequence change those of another"):
        refuse_leaks(model)


@pytest.mark.parametrize("distance", [-NEAR, NEAR])
def test_keys_are_compared_as_far_before_an_edge_as_behind_it(distance):
    with pytest.raises(CheckpointError, match="sees other positions"):
        window_of(lambda b, h, q, k: ((k <= q) & (k > q - 200)) ^ (k == q + distance), 10**6)


class Overflowing(nn.Module):
    """Adds infinity to all results of the first pass, and of no other."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.calls = 0

    def forward(self, hidden):
        self.calls += 1
        return self.inner(hidden) + (torch.inf if self.calls == 1 else 0.0)


def test_a_result_that_is_infinite_after_one_sequence_and_finite_after_another_is_refused(tmp_path):
    make("Granite", tmp_path)
    model = load_model(tmp_path)
    model.body.norm = Overflowing(model.body.norm)
    with pytest.raises(CheckpointError, match="tokens of a sequence change those of another"):
        refuse_leaks(model)
