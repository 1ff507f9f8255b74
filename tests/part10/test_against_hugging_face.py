"""Log probabilities equal Hugging Face's log_softmax to 1e-4: of prompts and outputs, in chunks or not."""

import pytest
import torch

from engine.decoding.params import SamplingParams
from engine.models.loader import load_model
from engine.text.tokenizer import Tokenizer
from tests.part01 import reference
from tests.part10.scored import finish

TEXTS = [
    "Once upon a time, there was a little girl named Lily. She loved to play outside.",
    "Quantum tariffs oscillate; 🦊 ate nothing.",
    "The",
]


@pytest.fixture(scope="module", params=["storyteller", "tiny_gpt2"])
def pair(request):
    """(our model, our tokenizer, Hugging Face's model)"""
    name = request.getfixturevalue("checkpoint" if request.param == "storyteller" else "tiny_gpt2")
    return load_model(name), Tokenizer.from_pretrained(name), reference.load(name)


@pytest.mark.parametrize("budget", [5, 64])
def test_every_score_is_hugging_faces(pair, engine_over, budget):
    model, tokenizer, theirs = pair
    engine = engine_over(model, tokenizer, budget=budget)
    sampled = {"temperature": 1.0, "max_tokens": 12, "ignore_eos": True, "logprobs": 5, "prompt_logprobs": 20}
    for i, text in enumerate(TEXTS):
        engine.add_request(str(i), text, SamplingParams(seed=i, **sampled))
    for output in finish(engine).values():
        (sample,), told = output.outputs, output.prompt_token_ids
        ids = [*told, *sample.token_ids]
        with torch.inference_mode():
            right = theirs(torch.tensor([ids])).logits[0].float().log_softmax(-1)  # [T, V]
        places = [*output.prompt_logprobs[1:], *sample.logprobs]
        assert len(places) == len(ids) - 1
        for row, token_id, scores in zip(right, ids[1:], places, strict=False):
            n = len(scores.top(20))
            for id, logprob in [(token_id, scores.logprob), *scores.top(n)]:
                assert logprob == pytest.approx(float(row[id]), abs=1e-4), (
                    f"log probability of {tokenizer.decode([id])!r} differs from Hugging Face's"
                )
            likeliest = row.topk(n).values.tolist()
            assert [p for _, p in scores.top(n)] == pytest.approx(likeliest, abs=1e-4)
            # Tokens as good as equal may stand in another order there.
            above, near = (1 + int((row > row[token_id] + margin).sum()) for margin in (1e-4, -1e-4))
            assert above <= scores[token_id].rank <= near
