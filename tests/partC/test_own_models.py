"""Our own Qwen2 and Mistral against Hugging Face's: the same logits, and the same tokens by every way."""

import json

import pytest
import torch

from engine import LLM, SamplingParams
from engine.attention.dense import causal as plain_causal
from engine.attention.extras import causal
from engine.models.checkpoint import CheckpointError
from engine.models.config import ModelConfig
from engine.models.loader import load_model
from tests.part01 import reference
from tests.partC.models import random_ids, random_model, saved

MIXED = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
MODELS = {
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2, a window in its second layer": ("qwen2", MIXED),
    "qwen2, windows everywhere": ("qwen2", MIXED | {"max_window_layers": 0}),
    "qwen2, a window that is switched off": ("qwen2", {"use_sliding_window": False, "sliding_window": 6}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral, wide heads": ("mistral", {"sliding_window": None, "head_dim": 32}),
    "mistral with a window": ("mistral", {"sliding_window": 6}),
    "mistral with a window smaller than a block": ("mistral", {"sliding_window": 3}),
    "mistral with a window longer than any text": ("mistral", {"sliding_window": 64}),
}
every_model = pytest.mark.parametrize("name", MODELS)


def made(name: str, folder):
    family, settings = MODELS[name]
    return saved(family, folder, seed=1, **settings)


@torch.inference_mode()
def logits(model, ids: list[int], attend=causal):
    return model.logits(model(torch.tensor(ids), torch.arange(len(ids)), attend))


@every_model
def test_logits_equal_hugging_faces(name, tmp_path):
    folder, theirs = made(name, tmp_path)
    ours = load_model(folder)
    for length in (1, 5, 40):
        ids = random_ids(length, seed=length)
        torch.testing.assert_close(logits(ours, ids), reference.logits(theirs, ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 8, "block_size": 4}])
@every_model
def test_greedy_tokens_are_those_of_generate(name, options, tmp_path):
    """Three at once; the second time in chunks of eight tokens, so prompts and tokens share steps."""
    folder, theirs = made(name, tmp_path)
    sizes = {"max_num_seqs": 3, "kv_cache_memory_bytes": 2**21}
    llm = LLM(folder, device="cpu", **sizes, **options)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    prompts = [random_ids(length, seed=length) for length in (1, 5, 30)]
    for _ in range(2):  # the second time, the prompts' blocks are in the prefix cache
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
        for ids, output in zip(prompts, outputs, strict=True):
            want = reference.generate(theirs, ids, max_new_tokens=16, eos_token_id=None)
            assert output.outputs[0].token_ids == want


def test_a_window_is_refused_by_name_where_attention_has_none(tmp_path):
    folder, _ = made("mistral with a window", tmp_path)
    with pytest.raises(ValueError, match="layer 0 wants window, and the attention that was handed in does"):
        logits(load_model(folder), [1, 2, 3], plain_causal)
    with pytest.raises(ValueError, match=r"kv_cache='slots': the attention of this model \(mistral\) has a"):
        LLM(folder, device="cpu", kv_cache="slots", max_num_seqs=1)


@pytest.mark.parametrize(
    ("family", "change", "named"),
    [
        ("mistral", {"sliding_window": 0}, "sliding_window=0: a whole number from 1 on"),
        ("mistral", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ("qwen2", {"layer_types": ["full_attention", "linear"]}, "layer_types has linear, which is not"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types names 1 layers, and the model has 2"),
    ],
)
def test_a_setting_that_is_not_computed_is_refused_by_name(family, change, named, tmp_path):
    path = reference.save(random_model(family), tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{named}"):
        ModelConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("name", "wants", "window"),
    [
        ("mistral", False, None),
        ("mistral with a window", True, 6),
        ("mistral with a window longer than any text", False, None),
        ("qwen2, a window in its second layer", True, None),
        ("qwen2, windows everywhere", True, 6),
        ("qwen2, a window that is switched off", False, None),
    ],
)
def test_only_a_model_with_windows_leaves_llamas_fast_path(name, wants, window, tmp_path):
    folder, _ = made(name, tmp_path)
    config = ModelConfig.from_pretrained(folder)
    assert (config.attention_extras, config.window) == (wants, window)
