"""Prompts packed end to end: each gets the logits it would get alone, and nothing is computed in vain."""

import pytest
import torch

from engine.attention.dense import dense_attention
from engine.attention.interface import Spans
from engine.decoding.greedy import FullForward
from engine.layers.prefill import pack, run_prefill
from engine.models.loader import load_model

TEXTS = [
    "Once upon a time, in a small house near the forest, there",
    "The",
    "Tom and Lily",
    "🦊",
    "It rained. " * 20,
]


def test_prompts_lie_end_to_end_and_each_counts_its_positions_from_zero():
    packed = pack([[5, 6, 7], [8], [9, 10]])
    assert packed.token_ids.tolist() == [5, 6, 7, 8, 9, 10], "prompts lie end to end, without filler"
    assert packed.positions.tolist() == [0, 1, 2, 0, 0, 1], "each prompt counts its positions from 0"
    assert packed.query_start == (0, 3, 4, 6), "query_start says where each begins, and last where all end"
    assert packed.last_rows == [2, 3, 5]


@pytest.mark.parametrize(("prompts", "index"), [([[]], 0), ([[1], [], [2], []], 1), ([[1], ()], 1)])
def test_an_empty_prompt_is_named(prompts, index):
    packed = error = None
    try:
        packed = pack(prompts)
    except ValueError as raised:
        error = raised
    assert error, f"prompt {index} is empty and has no last row, yet it was packed: {packed}"
    assert f"prompt {index} is empty" in str(error)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_each_prompt_has_the_logits_it_has_alone(model, tokenizer, count):
    prompts = [tokenizer.encode(text) for text in TEXTS[:count]]
    logits = run_prefill(model, prompts)
    assert logits.shape == (count, model.config.vocab_size), "one row of logits for each prompt"
    alone = [FullForward(model)(prompt) for prompt in prompts]
    wrong = [s for s in range(count) if (logits[s] - alone[s]).abs().max() > 1e-4]
    assert not wrong, (
        f"of {count} prompts, {wrong} (counting from 0) have other logits than alone: they see a "
        "neighbour, or another row than their last is taken"
    )
    for row, expected in zip(logits, alone, strict=True):
        assert torch.equal(row.topk(5).indices, expected.topk(5).indices)


def test_random_weights_and_lengths_too(tiny_gpt2):
    model = load_model(tiny_gpt2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        lengths = torch.randint(1, 60, (7,), generator=generator).tolist()
        prompts = [torch.randint(4096, (n,), generator=generator).tolist() for n in lengths]
        logits = run_prefill(model, prompts)
        for prompt, row in zip(prompts, logits, strict=True):
            assert (row - FullForward(model)(prompt)).abs().max() <= 1e-4


def test_order_changes_nothing_and_equal_prompts_have_equal_logits(model, tokenizer):
    prompts = [tokenizer.encode(text) for text in TEXTS]
    logits = run_prefill(model, prompts)
    backwards = run_prefill(model, prompts[::-1])
    assert (logits - backwards.flip(0)).abs().max() <= 1e-4
    twice = run_prefill(model, [prompts[0], prompts[1], prompts[0]])
    assert (twice[0] - twice[2]).abs().max() <= 1e-4


def test_the_model_computes_each_token_once_where_padding_would_compute_the_longest_for_all(model, tokenizer):
    prompts = [tokenizer.encode(text) for text in TEXTS]
    computed = []
    hook = model.register_forward_pre_hook(lambda _, args: computed.append(len(args[0])))
    try:
        run_prefill(model, prompts)
    finally:
        hook.remove()
    assert computed == [sum(map(len, prompts))], "all prompts go through the model in one pass, unpadded"
    padded = len(prompts) * max(map(len, prompts))
    assert computed[0] < padded / 2


def test_only_the_last_token_of_each_prompt_reaches_the_output_layer(model, monkeypatch):
    rows, logits = [], model.logits
    monkeypatch.setattr(model, "logits", lambda hidden: rows.append(len(hidden)) or logits(hidden))
    run_prefill(model, [[5, 6, 7], [8], [9, 10]])
    assert rows == [3], "only the last token of each prompt goes through the output layer"


def test_the_kernel_is_an_argument_and_keeps_prompts_apart(model):
    seen = []

    def kernel(q, k, v, spans):
        seen.append(spans)
        return dense_attention(q, k, v, spans)

    run_prefill(model, [[5, 6, 7], [8], [9, 10]], kernel)
    assert seen, "run_prefill uses the kernel that it is given"
    assert seen == [Spans((0, 3, 4, 6), (0, 3, 4, 6))] * model.config.num_layers, (
        "in every layer, queries and keys of a prompt lie in the same span"
    )
    assert len(set(map(id, seen))) == 1, "spans are made once, before the pass, not in every layer"


def test_a_prompt_longer_than_the_model_sees_is_refused(model):
    with pytest.raises(ValueError, match=str(model.config.max_positions)):
        run_prefill(model, [[5], [5] * (model.config.max_positions + 1)])
