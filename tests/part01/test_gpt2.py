"""Our GPT-2 against Hugging Face's: the same weights, the same ids, the same logits."""

import copy

import pytest
import torch

from engine.attention.dense import causal, dense_attention
from engine.attention.interface import Spans
from engine.models.checkpoint import embedded_models
from engine.models.loader import load_model
from tests.part01 import reference

SHAPES = {
    "plain": {},
    "one head": {"n_head": 1},
    "many heads": {"n_head": 16},
    "one layer": {"n_layer": 1},
    "five layers": {"n_layer": 5},
    "narrow mlp": {"n_inner": 20},
    "exact gelu": {"activation_function": "gelu"},
    "relu": {"activation_function": "relu"},
    "large epsilon": {"layer_norm_epsilon": 0.1},
    "head of its own": {"tie_word_embeddings": False},
}


@torch.inference_mode()
def logits(model, token_ids):
    """token_ids[T] -> [T, V]"""
    return model.logits(model(torch.tensor(token_ids), torch.arange(len(token_ids)), causal)).float()


def random_ids(count: int, vocab_size: int, seed: int = 0) -> list[int]:
    return torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_close(ours, theirs):
    assert (ours - theirs).abs().max() <= 1e-4
    assert torch.equal(ours.topk(5).indices, theirs.topk(5).indices)


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_of_random_weights_equal_hugging_faces(shape, tmp_path):
    theirs = reference.random_gpt2(seed=1, **SHAPES[shape])
    ours = load_model(reference.save(theirs, tmp_path))
    for length in (1, 2, 17, 64):
        ids = random_ids(length, 300, seed=length)
        assert_close(logits(ours, ids), reference.logits(theirs, ids))


@pytest.mark.parametrize("name", embedded_models())
def test_logits_of_the_embedded_models_equal_hugging_faces(name):
    ours, theirs = load_model(name), reference.load(name)
    ids = random_ids(700, ours.config.vocab_size)
    ours_logits, theirs_logits = logits(ours, ids), reference.logits(theirs, ids)
    assert (ours_logits - theirs_logits).abs().max() <= 1e-4
    # Random text leaves the model undecided: the top 5 are compared where they are apart.
    top = theirs_logits.topk(6).values
    apart = (top[:, :-1] - top[:, 1:]).min(dim=1).values > 1e-3
    assert apart.sum() > 500
    assert torch.equal(ours_logits[apart].topk(5).indices, theirs_logits[apart].topk(5).indices)


@pytest.fixture(scope="module")
def likeliest(checkpoint):
    """A text of Hugging Face's, and the five tokens it finds likeliest at each place."""
    theirs = reference.load(checkpoint)
    ids = reference.generate(theirs, [0], max_new_tokens=100, min_new_tokens=100)
    return ids, reference.logits(theirs, ids).topk(5).indices


@pytest.mark.parametrize(("dtype", "wanted"), [("float16", 0.95), ("bfloat16", 0.85)])
def test_half_precision_agrees_on_the_likeliest_tokens(checkpoint, likeliest, dtype, wanted):
    ids, b = likeliest
    a = logits(load_model(checkpoint, dtype=dtype), ids).topk(5).indices
    shared = (a[:, :, None] == b[:, None, :]).any(dim=2).float().mean()
    assert shared >= wanted
    assert (a[:, 0] == b[:, 0]).float().mean() >= wanted


def test_logits_are_computed_for_the_chosen_rows_only(tiny_gpt2):
    model = load_model(tiny_gpt2)
    ids = torch.tensor(random_ids(9, 4096))
    with torch.inference_mode():
        hidden = model(ids, torch.arange(9), causal)
        rows = model.logits(hidden[[2, 8]])
        every = model.logits(hidden)
    assert (hidden.shape, rows.shape) == ((9, 64), (2, 4096))
    torch.testing.assert_close(rows, every[[2, 8]], atol=1e-5, rtol=0)


def test_sequences_laid_end_to_end_do_not_notice_each_other(tiny_gpt2):
    model = load_model(tiny_gpt2)
    sequences = [random_ids(length, 4096, seed=length) for length in (5, 1, 12)]
    starts = (0, 5, 6, 18)
    spans = Spans(starts, starts)
    positions = torch.cat([torch.arange(len(ids)) for ids in sequences])
    with torch.inference_mode():
        hidden = model(
            torch.tensor([id for ids in sequences for id in ids]),
            positions,
            lambda layer, q, k, v: dense_attention(q, k, v, spans),
        )
        together = model.logits(hidden)
    for ids, a, b in zip(sequences, starts, starts[1:], strict=False):
        torch.testing.assert_close(together[a:b], logits(model, ids), atol=1e-5, rtol=0)


def test_attend_is_called_once_per_layer_with_heads_apart(tiny_gpt2):
    model = load_model(tiny_gpt2)
    seen = []

    def attend(layer, q, k, v):
        seen.append((layer, q.shape, k.shape, v.shape))
        return causal(layer, q, k, v)

    model(torch.tensor([5, 6, 7]), torch.arange(3), attend)
    assert seen == [(layer, (3, 4, 16), (3, 4, 16), (3, 4, 16)) for layer in (0, 1)]


def test_the_last_position_is_fine_and_the_next_is_refused(tiny_gpt2):
    model = load_model(tiny_gpt2)
    assert logits(model, [1] * 128).isfinite().all()
    with pytest.raises(ValueError, match=r"(?=.*\b128\b)(?=.*\b127\b)"):
        logits(model, [1] * 129)
    with pytest.raises(ValueError, match=r"(?=.*\b9999\b)(?=.*\b4095\b)"):
        logits(model, [9999])


def test_positions_matter(tiny_gpt2):
    model = load_model(tiny_gpt2)
    ids = torch.tensor([7, 8, 9])
    with torch.inference_mode():
        here, there = (model(ids, torch.arange(3) + shift, causal) for shift in (0, 20))
    assert (here - there).abs().max() > 1e-2


def test_a_layer_put_in_anothers_place_is_the_one_that_is_called(tiny_gpt2):
    """Our modules find their layers without nn.Module's search, and must not find an old one."""
    model = load_model(tiny_gpt2)
    x = torch.randn(2, 64)
    model.blocks[0].mlp.down = torch.nn.Identity()
    assert model.blocks[0].mlp(x).shape == (2, 256)
    model.norm.weight = torch.nn.Parameter(torch.zeros(64))
    assert torch.equal(model.norm(x), model.norm.bias.expand(2, 64))


def test_a_copy_of_the_model_has_layers_of_its_own(tiny_gpt2):
    model = load_model(tiny_gpt2)
    other = copy.deepcopy(model)
    other.blocks[0].mlp.down.weight.zero_()
    x = torch.randn(2, 64)
    assert not torch.equal(model.blocks[0].mlp(x), other.blocks[0].mlp(x))
    assert other.head.weight is other.embed.weight, "tied as before"


def test_hooks_are_heard(tiny_gpt2):
    model, heard = load_model(tiny_gpt2), []
    hooks = [
        model.norm.register_forward_pre_hook(lambda *_: heard.append("before")),
        model.norm.register_forward_hook(lambda *_: heard.append("after")),
    ]
    model.norm(torch.randn(2, 64))
    for hook in hooks:
        hook.remove()
    model.norm(torch.randn(2, 64))
    assert heard == ["before", "after"]


def test_a_model_that_moves_to_another_device_takes_its_weights_along():
    """To "meta", a device without numbers: a weight left behind would meet one that went."""
    model = load_model("storyteller")
    moved = copy.deepcopy(model).to("meta")
    ids = torch.arange(3, device="meta")
    x = moved.embed(ids) + moved.embed_position(ids)  # not `forward`, which may look at the numbers
    for block in moved.blocks:
        x = block(x, causal)
    assert moved.logits(moved.norm(x)).device.type == "meta"
    assert {one.device.type for one in model.parameters()} == {"cpu"}, "the copy took the original along"
