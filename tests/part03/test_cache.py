"""With the cache, everything comes out as without it: whole stories, chunks of any size, other dtypes."""

from random import Random

import pytest
import torch

from engine.cache.single import CachedForward
from engine.decoding.greedy import FullForward, generate
from engine.decoding.params import SamplingParams
from engine.models.loader import load_model
from engine.text.tokenizer import Tokenizer
from tests.part01 import reference

PROMPTS = [
    "Once upon a time",
    "One day, a cat and a dog met a bird.",
    "<|user|>Tell me a story about a boat and the moon<|assistant|>",
    "a",
]


def run(forward, tokenizer, prompt, config, **settings) -> list[int]:
    params = SamplingParams(**{"temperature": 0, "max_tokens": None} | settings)
    return generate(forward, tokenizer, config, prompt, params).outputs[0].token_ids


def parting(one: list[int], other: list[int]) -> str | None:
    """Where two lists of ids part, in words; None when they are equal."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return f"new token {place} is {a} in the one and {b} in the other"
    return None if len(one) == len(other) else f"{len(one)} tokens in the one, {len(other)} in the other"


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


# The small model: logits at every step.


def test_logits_equal_those_without_a_cache_at_every_step_to_the_last_position(random_model):
    model, theirs = random_model
    tokens = reference.generate(theirs, [1, 7, 42], max_length=64)
    sequence = [1, 7, 42, *tokens]
    assert len(sequence) == 64
    cached, full, expected = CachedForward(model), FullForward(model), reference.logits(theirs, sequence)
    for length in range(3, 65):
        logits = cached(sequence[:length])
        assert difference(logits, full(sequence[:length])) <= 1e-4, (
            f"not Part 2's logits after {length} tokens"
        )
        assert difference(logits, expected[length - 1]) <= 1e-4, f"not HF's logits after {length} tokens"


@pytest.mark.parametrize("seed", range(5))
def test_a_prompt_in_chunks_of_any_size_gives_the_same_logits(random_model, seed):
    model, theirs = random_model
    random = Random(seed)
    sequence = random.choices(range(300), k=64)
    ends = sorted({*random.sample(range(1, 64), k=random.randint(0, 12)), 64})
    cached, expected = CachedForward(model), reference.logits(theirs, sequence)
    for end in ends:
        assert difference(cached(sequence[:end]), expected[end - 1]) <= 1e-4, (
            f"other logits after {end} tokens"
        )


def test_the_callers_logits_are_not_changed_by_the_next_step(random_model):
    forward = CachedForward(random_model[0])
    first = forward([1, 2, 3])
    kept = first.clone()
    forward([1, 2, 3, 4])
    assert torch.equal(first, kept), "logits that were handed out belong to the caller"


def test_two_requests_at_once_do_not_touch_each_other(random_model):
    model, _ = random_model
    alone = CachedForward(model)
    alone([1, 2, 3])
    expected = alone([1, 2, 3, 4])
    one, two = CachedForward(model), CachedForward(model)
    one([1, 2, 3])
    two([9, 8, 7, 6, 5])
    assert torch.equal(one([1, 2, 3, 4]), expected), "each CachedForward has a cache of its own"


def test_the_kernels_result_is_what_the_model_gets(random_model):
    model, _ = random_model
    zeros = CachedForward(model, kernel=lambda q, k, v, spans: torch.zeros_like(q))
    assert not torch.allclose(zeros([1, 2, 3]), CachedForward(model)([1, 2, 3]), atol=1e-2)


# The trained model: whole stories.


@pytest.mark.parametrize("prompt", PROMPTS)
def test_tokens_equal_those_without_a_cache_and_hugging_faces(trained, prompt):
    model, tokenizer, theirs = trained
    cached = run(CachedForward(model), tokenizer, prompt, model.config, max_tokens=60)
    part2 = run(FullForward(model), tokenizer, prompt, model.config, max_tokens=60)
    assert not (told := parting(cached, part2)), f"the story is not Part 2's: {told}"
    hugging_face = reference.generate(theirs, tokenizer.encode(prompt), max_new_tokens=60)
    assert not (told := parting(cached, hugging_face)), f"the story is not Hugging Face's: {told}"


def test_tokens_equal_hugging_faces_up_to_the_models_length():
    model, theirs = load_model("storyteller-draft"), reference.load("storyteller-draft")
    tokenizer = Tokenizer.from_pretrained("storyteller-draft")
    prompt = tokenizer.encode(PROMPTS[0])
    room = model.config.max_positions - len(prompt)
    cached = run(CachedForward(model), tokenizer, prompt, model.config, min_tokens=room, max_tokens=room)
    assert len(cached) == room
    hugging_face = reference.generate(theirs, prompt, min_new_tokens=room, max_new_tokens=room)
    assert not (told := parting(cached, hugging_face)), f"the story is not Hugging Face's: {told}"


def test_logits_of_the_trained_model_in_long_chunks_equal_hugging_faces(trained):
    model, _, theirs = trained
    sequence = Random(0).choices(range(3, model.config.vocab_size), k=900)
    cached, expected = CachedForward(model), reference.logits(theirs, sequence)
    for end in (1, 2, 400, 401, 899, 900):
        assert difference(cached(sequence[:end]), expected[end - 1]) <= 1e-4, (
            f"other logits after {end} tokens"
        )


# Memory.


def test_bytes_per_token_of_the_trained_model(trained):
    model, _, _ = trained
    per_token = CachedForward(model).cache.num_bytes / model.config.max_positions
    assert per_token == 2 * model.config.num_layers * model.config.hidden_size * 4


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_cache_has_the_models_dtype_and_agrees_without_it(checkpoint, dtype):
    model = load_model(checkpoint, dtype=dtype)
    cached, full = CachedForward(model), FullForward(model)
    assert cached.cache.keys.dtype == getattr(torch, dtype)
    sequence = Random(1).choices(range(3, model.config.vocab_size), k=40)
    for end in (20, 21, 39, 40):
        a, b = cached(sequence[:end]), full(sequence[:end])
        assert len(set(a.topk(5).indices.tolist()) & set(b.topk(5).indices.tolist())) >= 4
