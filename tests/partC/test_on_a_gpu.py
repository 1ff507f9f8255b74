"""Extension C on a GPU: Hugging Face's tokens, by our kernels in graphs and without, and by its own code."""

import pytest
import torch

from engine import LLM, SamplingParams
from tests.part01 import reference
from tests.partC.families import EQUAL, make
from tests.partC.models import random_ids
from tests.partC.test_families import GREEDY, PROMPTS, likeliest
from tests.partC.test_own_models import every_model, made

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
ON_GPU = {"device": "cuda", "dtype": "float32", "max_num_seqs": 4, "kv_cache_memory_bytes": 2**23}


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@every_model
def test_our_models_give_the_tokens_of_generate(name, eager, tmp_path):
    """Three at once, in steps of at most sixteen tokens; the second time from the prefix cache."""
    folder, theirs = made(name, tmp_path)
    llm = LLM(folder, enforce_eager=eager, max_num_batched_tokens=16, **ON_GPU)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    prompts = [random_ids(length, seed=length) for length in (1, 5, 30)]
    for _ in range(2):
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        for ids, output in zip(prompts, outputs, strict=True):
            want = reference.generate(theirs, ids, max_new_tokens=16, eos_token_id=None)
            assert output.outputs[0].token_ids == want


@pytest.mark.parametrize("name", EQUAL)
def test_a_familys_tokens_are_hugging_faces(name, tmp_path):
    theirs = make(name, tmp_path)
    theirs.set_attn_implementation("eager")
    llm = LLM(tmp_path, model_impl="transformers", max_num_batched_tokens=16, **ON_GPU)
    for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False):
        prompt, tokens = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
        assert tokens == likeliest(theirs, prompt, tokens)[0], f"{name}: other tokens than Hugging Face's"
