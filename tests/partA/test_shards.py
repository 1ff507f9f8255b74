"""A rank's part of a model, without a second process: what is read, what is added once, what is refused."""

from dataclasses import replace

import pytest
import torch

from benchmarks.part20_models import random_model
from engine.lora.adapter import Adapter, Factors, targets_of
from engine.lora.slots import AdapterSlots
from engine.models.checkpoint import CheckpointError
from engine.models.config import ModelConfig
from engine.models.loader import load_model
from engine.models.weights import Place
from engine.parallel.layers import row_max, sum_over_ranks
from engine.parallel.shards import CUT_BY_INPUTS, Shards, accepted_sizes, cut, divide
from engine.quantization.quantize import quantize
from tests.part01 import reference

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def test_a_weight_is_cut_where_it_is_longer_than_this_ranks():
    """A layer has half of the outputs, or half of the inputs: the shape says which."""
    weight = torch.arange(48).view(6, 8)
    up, down = Place("blocks.0.mlp.up.weight"), Place("blocks.0.mlp.down.weight")
    part = Shards(1, 2).shard(weight, up, (3, 8))
    assert part.tolist() == weight[3:].tolist(), "[6, 8] for [3, 8] is cut by outputs: rank 1 has rows 3 to 5"
    part = Shards(1, 2).shard(weight, down, (6, 4))
    assert part.shape == (6, 4), "[6, 8] for [6, 4] is cut along dimension 1, by inputs"
    assert part.tolist() == weight[:, 4:].tolist(), "rank 1 has columns 4 to 7"
    norm = torch.arange(6)
    assert Shards(1, 2).shard(norm, Place("norm.weight"), (6,)) is norm, "what fits is whole on every rank"


def test_a_tensor_of_several_matrices_is_cut_as_its_place_says():
    """GPT-2's queries, keys and values, and their biases."""
    place = Place("blocks.0.attention.qkv.bias", matrices=3)
    bias = torch.tensor([0, 1, 10, 11, 20, 21])
    assert Shards(0, 2).shard(bias, place, (3,)).tolist() == [0, 10, 20], (
        "place.matrices says how many matrices the tensor holds, and each of them is cut"
    )


@pytest.mark.parametrize("layer", ["blocks.0.attention.proj", "blocks.3.mlp.down"])
def test_a_bias_behind_a_sum_is_rank_0s_alone(layer):
    """All ranks would add theirs: with two ranks it would count twice."""
    bias = torch.ones(6)
    first, second = (Shards(rank, 2).shard(bias, Place(f"{layer}.bias"), (6,)) for rank in range(2))
    assert bias.tolist() == [1] * 6, "the checkpoint's tensor itself is not changed"
    assert first.tolist() == [1] * 6, "rank 0 adds the bias, whole"
    assert second.tolist() == [0] * 6, "the others add zeros: the bias counts once in the sum"
    weight = Shards(1, 2).shard(torch.ones(6, 8), Place(f"{layer}.weight"), (6, 4))
    assert weight.all(), "only the bias is rank 0's alone: of the weight, each rank has its part"


def test_other_biases_are_added_by_whoever_has_the_output():
    part = Shards(1, 2).shard(torch.arange(6), Place("blocks.0.mlp.up.bias"), (3,))
    assert part.tolist() == [3, 4, 5], "no sum follows this layer: a rank has the biases of its outputs"
    assert Shards(1, 2).shard(torch.ones(6), Place("norm.bias"), (6,)).all(), "a norm's bias is every rank's"


def test_a_tensor_that_does_not_fit_is_left_to_the_loader():
    """It refuses it in its own words, with both shapes."""
    shards, place = Shards(1, 2), Place("blocks.0.mlp.up.weight")
    for shape in ((3, 9), (5, 8), (6,), (2, 4)):
        tensor = torch.ones(6, 8)
        assert shards.shard(tensor, place, shape) is tensor, f"no run of {tuple(tensor.shape)} has {shape}"
    assert shards.shard(torch.ones(6, 8), place, (3, 8)).shape == (3, 8)


def test_four_ranks():
    """What holds for two must hold for any number."""
    bias, place = torch.ones(8, dtype=torch.bfloat16), Place("blocks.0.mlp.down.bias")
    biases = [Shards(rank, 4).shard(bias, place, (8,)) for rank in range(4)]
    assert all(type(one) is torch.Tensor for one in biases), "zeros, and not None: the loader copies a tensor"
    assert torch.equal(sum(biases), bias), "of four ranks, too, rank 0 alone has the bias: it counts once"
    assert biases[3].dtype == bias.dtype, "zeros of the tensor's own dtype"
    weight, place = torch.arange(32.0).view(8, 4), Place("blocks.0.mlp.up.weight")
    parts = [Shards(rank, 4).shard(weight, place, (2, 4)) for rank in range(4)]
    assert torch.equal(torch.cat(parts), weight), "four ranks have a quarter each"
    assert Shards(1, 2).shard(weight, place, (4,)) is weight, "another number of dimensions: not cut"


@pytest.fixture(params=["llama", "qwen3", "gpt2"])
def folder(request, tmp_path):
    """A random model with biases, where its family has them."""
    if request.param == "gpt2":
        return reference.save(reference.random_gpt2(), tmp_path)
    biases = {"attention_bias": True, "mlp_bias": True} if request.param == "llama" else {}
    return reference.save(random_model(request.param, **HEADS, **biases), tmp_path)


def test_the_config_of_a_part(folder):
    config = ModelConfig.from_pretrained(folder)
    part = divide(config, 2)
    for name in ("num_heads", "num_kv_heads", "intermediate_size"):
        assert getattr(part, name) == getattr(config, name) // 2, f"{name} is divided"
    for name in ("hidden_size", "head_dim", "vocab_size", "num_layers", "max_positions"):
        assert getattr(part, name) == getattr(config, name), f"{name} is the same on every rank"


def test_what_cannot_be_divided_is_named_with_what_can(folder):
    config = ModelConfig.from_pretrained(folder)
    with pytest.raises(
        CheckpointError, match=r"tensor_parallel_size=3 does not divide num_heads=4; accepted"
    ):
        divide(config, 3)
    assert accepted_sizes(config)[:2] == [1, 2]
    assert 8 not in accepted_sizes(config)
    narrow = replace(config, num_heads=4, num_kv_heads=4, intermediate_size=6)
    with pytest.raises(CheckpointError, match=r"=4 does not divide intermediate_size=6; .* are 1, 2$"):
        divide(narrow, 4)


def test_two_parts_compute_what_the_whole_computes(folder):
    """The ranks' terms are added up by hand, layer by layer: every rank sees the same sum."""
    whole = load_model(folder)
    parts = [load_model(folder, sharding=Shards(rank, 2)) for rank in range(2)]
    for part in parts:
        assert sum(p.numel() for p in part.blocks.parameters()) < 0.6 * sum(
            p.numel() for p in whole.blocks.parameters()
        ), "a rank holds half of every layer"
    token_ids, positions = torch.tensor([5, 6, 7, 5]), torch.arange(4)
    x = whole(token_ids, positions, lambda layer, q, k, v: attend(q, k, v))
    assert torch.allclose(together(parts, token_ids, positions), x, atol=1e-4)


def test_two_parts_of_an_adapter_change_what_the_whole_changes(folder):
    """Every layer has one: fused in one layer (llama), or of several matrices side by side (GPT-2)."""
    torch.manual_seed(1)
    models = [load_model(folder), *(load_model(folder, sharding=Shards(rank, 2)) for rank in range(2))]
    layers = {}
    for target in targets_of(models[0].config).values():
        out, wide = target.shape
        factors = Factors(torch.randn(2, wide), torch.randn(out, 2), target.rows)
        layers[target.layer] = (*layers.get(target.layer, ()), factors)
    adapter = Adapter(2, 0.3, layers)
    token_ids, positions = torch.tensor([5, 6, 7, 5]), torch.arange(4)
    plain = models[0](token_ids, positions, lambda layer, q, k, v: attend(q, k, v))
    for model, rank in zip(models, (None, 0, 1), strict=True):
        shards = Shards(rank or 0, 2)
        shards.config(ModelConfig.from_pretrained(folder))
        slots, told = AdapterSlots(1, 2, 8, None if rank is None else shards.adapter), []
        slots.on_assign.append(lambda *told_now, told=told: told.append(told_now))
        slots.wrap(model)
        slots.add("mine", adapter)
        slots.assign("mine", [])
        assert told == [(0, adapter)], "the whole adapter, for the other ranks to cut"
        slots.write(0, adapter)
        slots.rows.fill([0], [0, 4])
    x = models[0](token_ids, positions, lambda layer, q, k, v: attend(q, k, v))
    assert not torch.allclose(x, plain, atol=0.1), "the adapter counts"
    assert torch.allclose(together(models[1:], token_ids, positions), x, atol=1e-3)


def test_the_codes_of_a_part_are_those_of_the_whole(folder):
    """A row that several ranks have parts of is scaled by its largest number, whoever has it."""
    plain, whole = load_model(folder), quantize(load_model(folder), "int8")

    def largest(name, weight):
        return plain.get_submodule(name).weight.abs().amax(1) if name.endswith(CUT_BY_INPUTS) else None

    for rank in range(2):
        part = quantize(load_model(folder, sharding=Shards(rank, 2)), "int8", row_max=largest)
        for name in ("blocks.0.attention.proj", "blocks.1.mlp.down"):
            mine, all_codes = part.get_submodule(name), whole.get_submodule(name)
            assert torch.equal(mine.scale, all_codes.scale)
            assert torch.equal(mine.codes, cut(all_codes.codes, 1, rank, 2))


def test_the_largest_of_a_row_over_the_ranks():
    class Group:
        def all_reduce_max(self, x):
            return torch.maximum(x, torch.tensor([4.0, 9.0]))

    weight = torch.tensor([[1.0, -5.0], [2.0, 3.0]])
    assert row_max(Group(), "blocks.0.mlp.down", weight).tolist() == [5, 9], "magnitudes, over all ranks"
    assert row_max(Group(), "blocks.0.mlp.up", weight) is None, "a rank has the whole row"


def attend(q, k, v):
    """Causal attention of one sequence, with heads of keys that are shared."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(torch.ones(len(q), len(q)).triu(1).bool(), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def together(parts, token_ids, positions):
    """Two parts in one process: a group whose sum adds what the parts give, in turns of threads."""
    from threading import Barrier, Thread

    terms, barrier, hidden = [None, None], Barrier(2), [None, None]

    class Group:
        size = 2

        def __init__(self, rank):
            self.rank = rank

        def all_reduce_sum(self, x):
            terms[self.rank] = x
            barrier.wait()
            total = terms[0] + terms[1]
            barrier.wait()
            return total

    def run(rank):
        model = sum_over_ranks(parts[rank], Group(rank))
        with torch.inference_mode():
            hidden[rank] = model(token_ids, positions, lambda layer, q, k, v: attend(q, k, v))

    threads = [Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(*hidden), "every rank has the same numbers behind a sum"
    return hidden[0]


def test_only_rank_0_keeps_the_output_layer(folder):
    class Alone:
        rank, size = 1, 2

        def all_reduce_sum(self, x):
            return x

    part = sum_over_ranks(load_model(folder, sharding=Shards(1, 2)), Alone())
    assert part.logits(torch.zeros(3, part.config.hidden_size)).shape == (3, 0)
