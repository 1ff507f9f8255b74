"""Qwen2 and Mistral in the few kernels that Llama has on a GPU, and models with windows in graphs."""

import pytest
import torch

pytest.importorskip("triton", reason="needs the package triton")

from engine import LLM, SamplingParams
from engine.execution import graphs
from engine.execution.extras_step import ExtrasStep
from engine.execution.graphs import GraphWay
from engine.kernels import llama_row
from engine.kernels.llama_prompts import LlamaPrompts
from engine.kernels.llama_row import LlamaRow
from engine.kernels.llama_rows import LlamaRows
from engine.kernels.tiles import Tile
from engine.models.loader import load_model
from engine.wiring.devices import load_devices
from engine.wiring.engine_args import EngineArgs
from engine.wiring.runners import make_runner
from tests.part01 import reference
from tests.part13.test_many_rows import TOLERANCE, VOCAB, Step
from tests.part13.test_paged_attention import DEVICE
from tests.part13.test_prompt_rows import check
from tests.part20.test_llama_rows import RowsStep
from tests.partC.models import random_ids, random_model, saved

MODELS = {
    "qwen2": ("qwen2", {"hidden_size": 64}),
    "qwen2, wide heads": ("qwen2", {"hidden_size": 64, "num_attention_heads": 2}),
    "mistral without a window": ("mistral", {"sliding_window": None, "head_dim": 32}),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    family, settings = MODELS[request.param]
    theirs = random_model(family, vocab_size=VOCAB, num_hidden_layers=1, **settings)
    return load_model(reference.save(theirs, tmp_path_factory.mktemp("model")), DEVICE, "float32")


def test_many_rows_give_the_models_logits(model):
    assert LlamaRows.fits(model)
    RowsStep(model, [0, 18, 1]).check(max_rows=4)


def test_one_row_gives_the_models_logits(model, monkeypatch):
    if DEVICE == "cpu":  # in the interpreter few programs, as Part 20's tests have them
        walks = {"qkv": Tile(16, 4, 2), "gate_up": Tile(32, 4, 1)}
        monkeypatch.setattr(llama_row, "TILES", dict.fromkeys(llama_row.TILES, Tile(16, 4, None)) | walks)
    if not LlamaRow.fits(model):
        pytest.skip("heads are too narrow for it")
    step = Step(model, [18])
    memory = step.memory.clone()
    with torch.inference_mode():
        want, stored = step.want()
        chain = LlamaRow(model, list(memory[0]), list(memory[1]))
        got = chain(step.token_ids, step.positions, step.slots, step.tables, step.context)
    assert torch.allclose(got, want, atol=TOLERANCE), "the chain's logits are the model's"
    assert torch.allclose(memory, stored, atol=1e-5), "the new token's key and value lie in its slot"


def test_prompts_give_the_models_hidden_states(model):
    check(model, LlamaPrompts(model))


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("mistral", {"sliding_window": 6}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
    ],
)
def test_greedy_tokens_with_our_kernels_are_those_of_generate(family, settings, tmp_path):
    """Prompts in one kernel, and tokens in a graph's step: on a CPU both in the interpreter."""
    folder, theirs = saved(family, tmp_path, seed=1, **settings)
    llm = LLM(folder, device=DEVICE, dtype="float32", attention="triton", max_num_seqs=2, block_size=4,
              kv_cache_memory_bytes=2**20, max_num_batched_tokens=8)  # fmt: skip
    way = llm.engine.executor.ways[0]
    assert isinstance(way, GraphWay)
    assert isinstance(way.graphs.step_of(1), ExtrasStep)
    prompts = [random_ids(length, seed=length) for length in (3, 14)]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    for ids, output in zip(prompts, outputs, strict=True):
        want = reference.generate(theirs.to("cpu"), ids, max_new_tokens=6, eos_token_id=None)
        assert output.outputs[0].token_ids == want


def test_a_rank_without_the_output_layer_looks_for_no_likeliest_token(tmp_path, monkeypatch):
    """Extension A: only the rank that chooses tokens keeps the layer, and the others have logits[R, 0]."""
    folder, _ = saved("mistral", tmp_path, sliding_window=6)
    args = EngineArgs(model=str(folder), device=DEVICE, dtype="float32", attention="triton", max_num_seqs=2,
                      block_size=4, kv_cache_memory_bytes=2**20)  # fmt: skip
    devices = load_devices(args)
    model = devices.runner.ways[-1].model
    monkeypatch.setattr(
        graphs, "Greedy", lambda *_: pytest.fail("it reads a row of logits, and there is none")
    )
    make_runner(devices.args, model, devices.memory, devices.sizes, 1, 2, has_head=False)
