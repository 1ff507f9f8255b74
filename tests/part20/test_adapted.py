"""Adapters and quantized weights on Llama and Qwen3: fused layers take in what is three layers elsewhere."""

import pytest
import torch

from benchmarks.part20_models import random_model
from engine import LLM, SamplingParams
from engine.models.loader import load_model
from tests.part01 import reference

PROMPTS = [[5, 6, 7, 5, 6, 7], [9], [3, 1, 4, 1, 5, 9, 2, 6]]
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
OPTIONS = {"device": "cpu", "dtype": "float32", "max_num_seqs": 4, "kv_cache_memory_bytes": 2**21}
ASKED = [{"prompt_token_ids": ids} for ids in PROMPTS]


def told(theirs) -> list[list[int]]:
    return [reference.generate(theirs, ids, max_new_tokens=10, eos_token_id=None) for ids in PROMPTS]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_an_adapter_of_every_layer_changes_its_own_rows(family, tmp_path):
    """Beside requests without it, in the same steps: the tokens of `peft`, and of the model alone."""
    request = pytest.importorskip("engine.lora.request", reason="Part 18 brings adapters")
    peft = pytest.importorskip("peft", reason="needs the package peft, which makes the adapter")
    theirs = random_model(family, seed=3)
    folder = reference.save(theirs, tmp_path / "model", tokenizer=True)
    plain = told(theirs)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=names, init_lora_weights=False)
    torch.manual_seed(1)
    adapted = peft.get_peft_model(theirs, config).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    changed = told(adapted)
    assert changed != plain
    lora = request.LoRARequest("mine", 1, tmp_path / "adapter")
    llm = LLM(folder, enable_lora=True, **OPTIONS)
    outputs = llm.generate(ASKED + ASKED, GREEDY, lora_request=[lora] * 3 + [None] * 3)
    assert [output.outputs[0].token_ids for output in outputs] == changed + plain


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_slots_take_the_bytes_that_are_said_before(family, tmp_path):
    """Query, key and value are one layer here, and so are gate and up: it has slots for each of them."""
    lora = pytest.importorskip("engine.lora.slots", reason="Part 18 brings adapters")
    model, slots = load_model(reference.save(random_model(family), tmp_path)), lora.AdapterSlots(2, 4, 16)
    said = slots.num_bytes(model)
    slots.wrap(model)
    assert said == sum(layer.down.nbytes + layer.up.nbytes for layer in slots.layers.values()) > 0


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("method", ["int8", "int4"])
def test_quantized_weights_stay_close(family, method, tmp_path):
    pytest.importorskip("engine.quantization.quantize", reason="Part 17 brings quantized weights")
    shape = {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.05}  # int4: groups of 64
    theirs = random_model(family, seed=3, **shape)
    folder = reference.save(theirs, tmp_path, tokenizer=True)
    llm = LLM(folder, quantization=method, **OPTIONS)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    close = {"int8": 0.1, "int4": 1.0}[method]
    for ids, output in zip(PROMPTS, llm.generate(ASKED, params), strict=True):
        want = reference.logits(theirs, ids).log_softmax(-1)
        for place, scores in enumerate(output.prompt_logprobs[1:]):
            id = ids[place + 1]
            assert scores[id].logprob == pytest.approx(float(want[place, id]), abs=close)
