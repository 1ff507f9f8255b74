"""With the cache, everything comes out as without it."""

import dataclasses
from random import Random

import pytest
import torch

from engine.attention.dense import causal_attention, dense_attention
from engine.cache.single import CachedForward, SingleCache
from engine.config import ModelConfig
from engine.decoding.greedy import FullForward, generate
from engine.decoding.params import SamplingParams
from engine.models.loader import load_model
from engine.tokenizer import Tokenizer
from tests.part01 import reference

PROMPTS = [
    "Once upon a time",
    "One day, a cat and a dog met a bird.",
    "<|user|>Tell me a story about a boat and the moon<|assistant|>",
    "a",
]
CONFIG = ModelConfig(
    model_type="mock", vocab_size=1, hidden_size=1, num_layers=3, num_heads=6, num_kv_heads=2, head_dim=5,
    intermediate_size=1, max_positions=20, norm_eps=1.0, activation="none", tie_word_embeddings=True,
)  # fmt: skip


def run(forward, tokenizer, prompt, config, **settings) -> list[int]:
    params = SamplingParams(**{"temperature": 0, "max_tokens": None} | settings)
    return generate(forward, tokenizer, config, prompt, params).outputs[0].token_ids


@pytest.mark.parametrize("prompt", PROMPTS)
def test_tokens_equal_those_without_a_cache_and_hugging_faces(trained, prompt):
    model, tokenizer, theirs = trained
    cached = run(CachedForward(model), tokenizer, prompt, model.config, max_tokens=110)
    assert cached == run(FullForward(model), tokenizer, prompt, model.config, max_tokens=110)
    assert cached == reference.generate(theirs, tokenizer.encode(prompt), max_new_tokens=110)


def test_tokens_equal_hugging_faces_up_to_the_models_length():
    model, theirs = load_model("storyteller-draft"), reference.load("storyteller-draft")
    tokenizer = Tokenizer.from_pretrained("storyteller-draft")
    prompt = tokenizer.encode(PROMPTS[0])
    room = model.config.max_positions - len(prompt)
    cached = run(CachedForward(model), tokenizer, prompt, model.config, min_tokens=room, max_tokens=room)
    assert len(cached) == room
    assert cached == reference.generate(theirs, prompt, min_new_tokens=room, max_new_tokens=room)


def test_logits_equal_those_without_a_cache_at_every_step_to_the_last_position(random_model):
    model, theirs = random_model
    tokens = reference.generate(theirs, [1, 7, 42], max_length=64)
    sequence = [1, 7, 42, *tokens]
    assert len(sequence) == 64
    cached, full, expected = CachedForward(model), FullForward(model), reference.logits(theirs, sequence)
    for length in range(3, 65):
        logits = cached(sequence[:length])
        assert (logits - full(sequence[:length])).abs().max() <= 1e-4
        assert (logits - expected[length - 1]).abs().max() <= 1e-4


@pytest.mark.parametrize("seed", range(5))
def test_a_prompt_in_chunks_of_any_size_gives_the_same_logits(random_model, seed):
    model, theirs = random_model
    random = Random(seed)
    sequence = random.choices(range(300), k=64)
    ends = sorted({*random.sample(range(1, 64), k=random.randint(0, 12)), 64})
    cached, expected = CachedForward(model), reference.logits(theirs, sequence)
    for end in ends:
        assert (cached(sequence[:end]) - expected[end - 1]).abs().max() <= 1e-4


def test_logits_of_the_trained_model_in_long_chunks_equal_hugging_faces(trained):
    model, _, theirs = trained
    sequence = Random(0).choices(range(3, model.config.vocab_size), k=900)
    cached, expected = CachedForward(model), reference.logits(theirs, sequence)
    for end in (1, 2, 400, 401, 899, 900):
        assert (cached(sequence[:end]) - expected[end - 1]).abs().max() <= 1e-4


def test_only_new_tokens_are_computed_at_their_true_positions(random_model):
    model, _ = random_model
    forward, seen = CachedForward(model), []

    class Watched(torch.nn.Module):
        config = model.config
        logits = model.logits

        def forward(self, token_ids, positions, attend):
            seen.append((token_ids.tolist(), positions.tolist()))
            return model(token_ids, positions, attend)

    forward.model = Watched()
    for length in (3, 4, 5, 9):
        forward(list(range(10, 10 + length)))
    assert seen == [
        ([10, 11, 12], [0, 1, 2]),
        ([13], [3]),
        ([14], [4]),
        ([15, 16, 17, 18], [5, 6, 7, 8]),
    ]
    assert forward.cache.length == 9


def test_the_callers_logits_are_not_changed_by_the_next_step(random_model):
    forward = CachedForward(random_model[0])
    first = forward([1, 2, 3])
    kept = first.clone()
    forward([1, 2, 3, 4])
    assert torch.equal(first, kept)


@pytest.mark.parametrize(
    ("calls", "refused"),
    [
        ([], []),
        ([[1, 2, 3]], [1, 2, 3]),
        ([[1, 2, 3]], [1, 2]),
        ([], [1] * 11),
        ([[1] * 10], [1] * 11),
    ],
)
def test_a_sequence_that_does_not_grow_or_does_not_fit_is_refused_and_changes_nothing(
    random_model, calls, refused
):
    model, _ = random_model
    forward = CachedForward(model, max_tokens=10)
    for call in calls:
        forward(call)
    held = forward.cache.length
    with pytest.raises(ValueError, match=rf"(?=.*\b{len(refused)}\b)(?=.*\b{held}\b)(?=.*\b10\b)"):
        forward(refused)
    assert forward.cache.length == held


def test_room_is_the_models_length_unless_said(random_model):
    model, _ = random_model
    assert CachedForward(model).cache.max_tokens == 64
    assert CachedForward(model, max_tokens=7).cache.max_tokens == 7


def test_two_requests_have_a_cache_each(random_model):
    model, _ = random_model
    alone = CachedForward(model)
    alone([1, 2, 3])
    expected = alone([1, 2, 3, 4])
    one, two = CachedForward(model), CachedForward(model)
    one([1, 2, 3])
    two([9, 8, 7, 6, 5])
    assert torch.equal(one([1, 2, 3, 4]), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_bytes_from_the_formula_are_the_tensors_bytes(dtype):
    size = torch.empty(0, dtype=dtype).element_size()
    cache = SingleCache(CONFIG, max_tokens=11, dtype=dtype)
    assert cache.num_bytes == 11 * CONFIG.kv_bytes_per_token(size)
    assert cache.num_bytes == cache.keys.numel() * size + cache.values.numel() * size
    assert cache.keys.shape == cache.values.shape == (3, 11, 2, 5)


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


def random_qkv(tokens: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    heads = (CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.num_kv_heads)
    return [torch.randn(tokens, count, CONFIG.head_dim, generator=generator) for count in heads]


def test_grouped_heads_are_kept_once_and_every_layer_has_its_own():
    cache = SingleCache(CONFIG, max_tokens=9)
    layers = [random_qkv(9, seed=layer) for layer in range(3)]
    whole = [causal_attention(*qkv) for qkv in layers]
    for start, end in ((0, 4), (4, 5), (5, 9)):
        for layer, qkv in enumerate(layers):
            out = cache.attend(layer, *(x[start:end] for x in qkv))
            torch.testing.assert_close(out, whole[layer][start:end], atol=1e-5, rtol=0)
        cache.advance(end - start)
    assert torch.equal(cache.keys, torch.stack([k for _, k, _ in layers]))
    assert torch.equal(cache.values, torch.stack([v for _, _, v in layers]))


def test_the_kernel_handed_in_is_called_with_the_new_queries_and_all_keys():
    calls = []

    def kernel(q, k, v, spans):
        calls.append((len(q), len(k), len(v), list(spans.query_start), list(spans.key_start)))
        return dense_attention(q, k, v, spans)

    cache = SingleCache(CONFIG, max_tokens=9, kernel=kernel)
    for tokens in (4, 1):
        cache.attend(0, *random_qkv(tokens))
        cache.advance(tokens)
    assert calls == [(4, 4, 4, [0, 4], [0, 4]), (1, 5, 5, [0, 1], [0, 5])]


def test_the_kernels_result_is_what_the_model_gets(random_model):
    model, _ = random_model
    zeros = CachedForward(model, kernel=lambda q, k, v, spans: torch.zeros_like(q))
    assert not torch.allclose(zeros([1, 2, 3]), CachedForward(model)([1, 2, 3]), atol=1e-2)


def test_what_lies_behind_the_length_is_never_read():
    cache = SingleCache(CONFIG, max_tokens=9)
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)
    assert cache.attend(0, *random_qkv(4)).isfinite().all()
    cache.advance(4)
    assert cache.attend(0, *random_qkv(1)).isfinite().all()


def test_more_tokens_than_room_are_not_stored_over_the_edge():
    cache = SingleCache(dataclasses.replace(CONFIG, num_layers=1), max_tokens=3)
    with pytest.raises(RuntimeError):
        cache.attend(0, *random_qkv(4))
