"""Gemma's gated MLP, by hand."""

import math
from types import SimpleNamespace

import torch

from engine.models.gemma import MLP


def gelu_tanh(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def mlp() -> MLP:
    """gate is x times 1 and -1; up is x times 10; down adds both up, times 1 and 100."""
    made = MLP(SimpleNamespace(hidden_size=1, intermediate_size=2, mlp_bias=False))
    made.gate_up.weight.data = torch.tensor([[1.0], [-1.0], [10.0], [10.0]])
    made.down.weight.data = torch.tensor([[1.0, 100.0]])
    return made


@torch.inference_mode()
def test_the_gate_goes_through_gelu_and_up_does_not():
    for x in (0.5, 2.0, -1.5):
        got = float(mlp()(torch.tensor([[x]])))
        want = gelu_tanh(x) * 10 * x + 100 * gelu_tanh(-x) * 10 * x
        assert abs(got - want) < 0.01 * abs(want), (
            f"down(gelu(gate) · up) of {x} is {want:.4f}, and not {got:.4f}: only the gate, which is the "
            "first half of gate_up, goes through the activation, and that is GELU"
        )


@torch.inference_mode()
def test_it_stays_in_the_dtype_of_the_model():
    made = mlp().bfloat16()
    made.down = torch.nn.Identity()  # shows what would go through down
    got = made(torch.tensor([[0.5]], dtype=torch.bfloat16))
    assert got.dtype == torch.bfloat16, "unlike the norm, the MLP computes in the dtype of x all along"


@torch.inference_mode()
def test_it_is_the_tanh_approximation():
    """At 2 the approximation is 1.954598, and the exact GELU 1.954500."""
    made = mlp()
    made.down.weight.data = torch.tensor([[1.0, 0.0]])
    got = float(made(torch.tensor([[2.0]])))
    assert abs(got - gelu_tanh(2.0) * 20) < 2e-4, "GELU is the tanh approximation, and not the exact one"
