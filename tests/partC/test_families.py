"""Hugging Face's modelling code on our pages: each family gives its tokens, or is refused by name."""

from pathlib import Path

import pytest
import torch

from engine import LLM, SamplingParams
from engine.models.checkpoint import CheckpointError
from engine.models.transformers_model import config_from
from tests.partC.families import EQUAL, REFUSED, make, refused_config, table

PROMPTS = [
    "Once upon a time there was a dog who ran and ran all day long in the green park with a red ball",
    "The",
    "A cat and a bird sat in the old tree by the river when",
]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
CHUNKED = {"max_num_batched_tokens": 8, "max_num_seqs": 4, "block_size": 4, "kv_cache_memory_bytes": 2**22}
SMALLEST_GAP = 5e-3  # between the two likeliest tokens: rounding is a hundredth of it


@torch.inference_mode()
def likeliest(theirs, prompt: list[int], output: list[int]) -> tuple[list[int], float]:
    """(Hugging Face's likeliest token behind the prompt and each token of the output but the last, the
    smallest gap between the two largest logits).
    """
    logits = theirs(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    two = logits.topk(2).values  # [8, 2]
    return logits.argmax(-1).tolist(), float((two[:, 0] - two[:, 1]).min())


@pytest.mark.parametrize("name", EQUAL)
def test_a_familys_tokens_are_hugging_faces(name, tmp_path):
    """Greedy, three requests at once, prompts in chunks of at most eight tokens; then again, from the prefix
    cache.
    """
    theirs = make(name, tmp_path)
    theirs.set_attn_implementation("eager")
    llm = LLM(tmp_path, model_impl="transformers", device="cpu", **CHUNKED)
    assert llm.config.model_impl == "transformers"
    for time in ("first", "second"):
        for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False):
            prompt, tokens = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
            told, gap = likeliest(theirs, prompt, tokens)
            assert gap > SMALLEST_GAP, f"the likeliest two differ by {gap:.2g}: choose another seed"
            assert tokens == told, f"the {time} time, {name} gives other tokens than Hugging Face's generate"
            is_cached = time == "second" and len(prompt) > CHUNKED["block_size"]
            assert bool(output.num_cached_tokens) == is_cached, "a prompt seen before is not computed again"


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_is_refused_in_a_line_that_says_what_is_supported(name):
    with pytest.raises(CheckpointError) as refusal:
        config_from(refused_config(name))
    message = str(refusal.value)
    assert REFUSED[name][2] in message
    assert ") is not supported; supported: " in message
    assert "with the package transformers every decoder of text in which" in message
    assert "\n" not in message


def test_the_articles_tables_are_those_of_the_families():
    article = Path(__file__).parents[2] / "articles" / "C_any_model.md"
    assert table() in article.read_text(encoding="utf-8"), (
        "the article has another table: `python -m tests.partC.families` prints the right one"
    )
    assert table().count("\n| ") == len(EQUAL) + len(REFUSED) + 1, "a row for each, and a second heading"
