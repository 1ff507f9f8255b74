"""Prompts of Llama and Qwen3 in few kernels: the hidden states of the model's own forward pass."""

import pytest

pytest.importorskip("triton", reason="needs the package triton")

from engine.kernels.llama_prompts import LlamaPrompts, prompt_forward
from tests.part13.test_paged_attention import DEVICE
from tests.part13.test_prompt_rows import check
from tests.part20.test_llama_rows import MODELS, made


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    return made(*MODELS[request.param], tmp_path_factory.mktemp("model"))


def test_hidden_states_are_the_models(model):
    check(model, LlamaPrompts(model))


def test_without_a_gpu_the_model_itself_is_taken(model):
    assert (prompt_forward(model) is model) == (DEVICE == "cpu")
