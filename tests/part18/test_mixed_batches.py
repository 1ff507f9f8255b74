"""Requests for different adapters in one batch: each computes what it would alone, and what PEFT does."""

import pytest
import torch

from engine.attention.dense import causal
from engine.decoding.params import NotFoundError, SamplingParams
from engine.layers.packed_linear import Transposed, pack_linears
from engine.layers.replace import replace_linears
from engine.lora.adapter import Factors, read_adapter
from engine.lora.layer import LoRALinear
from engine.lora.rows import GroupedRows
from engine.lora.slots import AdapterSlots
from engine.models.loader import load_model
from tests.part06.fakes import TOKENIZER, assert_idle, run_to_end
from tests.part18.ahead import composed_ahead
from tests.part18.tiny import (
    GREEDY,
    KINDS,
    MAX_RANK,
    PROMPT,
    P,
    adapted_model,
    by_hand,
    composed,
    load,
    their_logits,
    theirs,
)

SCORED = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3, prompt_logprobs=2)
LEAD = 1e-3  # of the likeliest token before the next one: nearer ones could change places


def told_by_peft(base, adapter, prompt: str, count: int) -> list[int]:
    """Greedy tokens, one full forward pass each."""
    model, ids = theirs(base, adapter), TOKENIZER.encode(prompt)
    for _ in range(count):
        best = their_logits(model, ids)[-1].topk(2)
        assert best.values[0] - best.values[1] > LEAD, "a near tie proves nothing: choose another prompt"
        ids.append(int(best.indices[0]))
    return ids[-count:]


def tokens(output) -> list[int]:
    assert output.error is None
    return list(output.outputs[0].token_ids)


def test_base_and_two_adapters_in_one_batch_give_pefts_tokens(base, adapters):
    engine, manager = composed(base)
    for name in ("poetry", "business"):
        load(manager, name, adapters[name], engine.config)
    for name in ("poetry", None, "business"):
        engine.add_request(str(name), PROMPT, GREEDY, adapter=name)
    together = 0
    done = {}
    while engine.has_unfinished_requests():
        outputs = engine.step()
        together = max(together, len(outputs))
        done |= {output.request_id: output for output in outputs if output.finished}
    assert together == 3, "all three in one step"
    found = {name: tokens(done[name]) for name in done}
    assert found == {name: told_by_peft(base, adapters.get(name), PROMPT, 8) for name in found}
    assert len({tuple(ids) for ids in found.values()}) == 3, "three different texts"
    assert_idle(engine)


@pytest.mark.parametrize("name", KINDS)
def test_log_probabilities_are_pefts(base, adapters, name):
    """Of the prompt, too: these rows stop before the output layer, and wait for it in chunks."""
    engine, manager = composed(base)
    load(manager, name, adapters[name], engine.config)
    engine.add_request("a", PROMPT, SCORED, adapter=name)
    engine.add_request("b", "somebody else", GREEDY)
    done = run_to_end(engine)["a"]
    ids = [*TOKENIZER.encode(PROMPT), *tokens(done)]
    want = their_logits(theirs(base, adapters[name]), ids).log_softmax(-1)
    told = [*done.prompt_logprobs[1:], *done.outputs[0].logprobs]
    for i, scores in enumerate(told):
        assert scores[ids[i + 1]].logprob == pytest.approx(float(want[i, ids[i + 1]]), abs=1e-3)


@torch.inference_mode()
def test_unmerged_logits_are_pefts_merged_ones(base, adapters):
    """Row by row, with neighbours of other adapters on both sides."""
    model, slots = adapted_model(base, max_loras=3)
    for slot, folder in enumerate(adapters.values()):
        slots.write(slot, read_adapter(folder, model.config))
    ids = torch.arange(3, 15)
    for slot, folder in enumerate(adapters.values()):
        slots.rows.fill([slot], [0, 12])
        mine = model.logits(model(ids, torch.arange(12), causal))
        want = their_logits(theirs(base, folder, merged=True), ids.tolist())
        assert (mine - want).abs().max() <= 1e-4
    slots.rows.fill([-1], [0, 12])
    plain = model.logits(model(ids, torch.arange(12), causal))
    assert (plain - their_logits(theirs(base), ids.tolist())).abs().max() <= 1e-4, "the base is as it was"


def mixture(manager, engine, adapters):
    """Twelve requests, of prompts short and long, for adapters in turns; some share what they begin with."""
    for name, folder in adapters.items():
        load(manager, name, folder, engine.config)
    prompts = ["a tale", "a tale of two cities and more than that", PROMPT, "x"]
    return {f"{name}: {prompt}": (prompt, name) for prompt in prompts for name in (None, *adapters)}


@pytest.mark.parametrize(
    ("compose", "seats", "blocks", "max_loras"),
    [
        (composed, 4, 60, 3), (composed, 3, 22, 3), (composed_ahead, 4, 60, 3),
        (composed, 4, 60, 1), (composed, 3, 22, 2), (composed_ahead, 4, 60, 1), (composed_ahead, 4, 60, 2),
    ],
    ids=[
        "roomy", "tight", "one step ahead",
        "one slot", "tight, two slots", "one slot, one step ahead", "two slots, one step ahead",
    ],
)  # fmt: skip
def test_every_request_in_a_mixed_crowd_gets_what_it_gets_alone(
    base, adapters, compose, seats, blocks, max_loras
):
    """With chunks, a prefix cache, preemption, and waiting for slots; sampled and greedy."""
    engine, manager = compose(base, max_loras=max_loras, seats=seats, blocks=blocks)
    asked = mixture(manager, engine, adapters)
    params = {
        name: SamplingParams(temperature=i % 2 * 0.8, seed=i, max_tokens=6 + i % 5, ignore_eos=True)
        for i, name in enumerate(asked)
    }
    for name, (prompt, adapter) in asked.items():
        engine.add_request(name, prompt, params[name], adapter=adapter)
    done = run_to_end(engine)
    assert_idle(engine)
    alone, others = composed(base, max_loras=3)
    same = mixture(others, alone, adapters)
    for name, (prompt, adapter) in same.items():
        alone.add_request(name, prompt, params[name], adapter=adapter)
        assert tokens(run_to_end(alone)[name]) == tokens(done[name]), name


def test_a_prefix_is_never_found_under_another_adapter(base, adapters):
    engine, manager = composed(base, max_loras=2)
    for name in ("poetry", "business"):
        load(manager, name, adapters[name], engine.config)
    prompt, names = "0123456789" * 2, (None, "poetry", "business")

    def cached(adapter, request_id) -> int:
        engine.add_request(request_id, prompt, GREEDY, adapter=adapter)
        return run_to_end(engine)[request_id].num_cached_tokens

    assert [cached(name, f"first {name}") for name in names] == [0, 0, 0], "each computes its own"
    assert [cached(name, f"again {name}") for name in names] == [20 - P] * 3, "and finds its own"


def test_a_reloaded_adapter_does_not_find_what_the_old_one_computed(base, adapters):
    """The same name, and even the same folder: other numbers may be in it now."""
    engine, manager = composed(base, max_loras=1)
    prompt = "0123456789" * 2
    for number, name in enumerate(["poetry", "business", "poetry"]):
        load(manager, "style", adapters[name], engine.config, load_inplace=number > 0)
        engine.add_request(f"{number}", prompt, GREEDY, adapter="style")
        done = run_to_end(engine)[f"{number}"]
        assert done.num_cached_tokens == 0, "a prefix of another load is another prefix"
        assert tokens(done) == told_by_peft(base, adapters[name], prompt, 8)


@pytest.mark.parametrize("max_loras", [1, 2])
def test_an_adapter_is_swapped_while_requests_run(base, adapters, max_loras):
    """Whoever was queued before keeps the old one, whoever comes gets the new one: in one batch, or one after
    the other.
    """
    engine, manager = composed(base, max_loras=max_loras)
    old = load(manager, "style", adapters["poetry"], engine.config)
    engine.add_request("old", PROMPT, GREEDY, adapter="style")
    for _ in range(3):
        engine.step()
    engine.add_request("queued", PROMPT, GREEDY, adapter="style")
    new = load(manager, "style", adapters["business"], engine.config, load_inplace=True)
    engine.add_request("new", PROMPT, GREEDY, adapter="style")
    done = run_to_end(engine)
    told = {name: told_by_peft(base, adapters[name], PROMPT, 8) for name in ("poetry", "business")}
    assert tokens(done["old"]) == told["poetry"], "it keeps its adapter"
    assert tokens(done["queued"]) == told["poetry"], "so does one that waits"
    assert tokens(done["new"]) == told["business"]
    assert set(manager.slots.adapters) == {old, new}
    load(manager, "third", adapters["stable"], engine.config)
    assert old not in manager.slots.adapters, "nobody needs it any more"
    assert old not in manager.slots.slot_of
    engine.add_request("third", PROMPT, GREEDY, adapter="third")
    assert tokens(run_to_end(engine)["third"]) == told_by_peft(base, adapters["stable"], PROMPT, 8)


def test_a_name_is_settled_when_the_request_is_queued_and_not_before(base, adapters):
    """Between its check and the queue, the name may get another adapter, or be unloaded."""
    engine, manager = composed(base, max_loras=1)
    load(manager, "style", adapters["poetry"], engine.config)
    made = {name: engine.make_requests(name, PROMPT, GREEDY, adapter="style") for name in ("a", "b")}
    load(manager, "style", adapters["business"], engine.config, load_inplace=True)
    engine.add("a", made["a"], PROMPT)
    assert tokens(run_to_end(engine)["a"]) == told_by_peft(base, adapters["business"], PROMPT, 8)
    manager.unload("style")
    with pytest.raises(NotFoundError, match="adapter 'style' is not loaded"):
        engine.add("b", made["b"], PROMPT)
    assert_idle(engine)


def test_more_adapters_than_slots_take_turns(base, adapters):
    """Ten rounds of three adapters over each number of slots: everybody is answered, and rightly."""
    want = {name: told_by_peft(base, folder, PROMPT, 8) for name, folder in adapters.items()}
    for max_loras in (1, 2):
        engine, manager = composed(base, max_loras=max_loras)
        for name, folder in adapters.items():
            load(manager, name, folder, engine.config)
        for i in range(10):
            for name in adapters:
                engine.add_request(f"{name} {i}", PROMPT, GREEDY, adapter=name)
        done = run_to_end(engine)
        assert len(done) == 30
        assert all(tokens(done[f"{name} {i}"]) == want[name] for name in want for i in range(10))
        assert_idle(engine)


def test_a_request_that_is_aborted_while_it_waits_for_a_slot_leaves_nothing_behind(base, adapters):
    engine, manager = composed(base, max_loras=1)
    for name in ("poetry", "business"):
        load(manager, name, adapters[name], engine.config)
    engine.add_request("runs", PROMPT, GREEDY, adapter="poetry")
    engine.add_request("waits", PROMPT, GREEDY, adapter="business")
    engine.step()
    assert [request.request_id for request in engine.scheduler.waiting] == ["waits"]
    manager.unload("business")
    assert engine.abort_request("waits").outputs[0].finish_reason == "abort"
    assert tokens(run_to_end(engine)["runs"]) == told_by_peft(base, adapters["poetry"], PROMPT, 8)
    assert_idle(engine)
    key = manager.key("poetry")
    assert list(manager.slots.adapters) == [key], "business had neither a name nor a request any more"
    assert list(manager.slots.slot_of) == [key]


def test_a_smaller_rank_leaves_nothing_of_the_adapter_before_it(base, adapters):
    """Slots are used again: rank 4 in all layers, then rank 2 in some."""
    engine, manager = composed(base, max_loras=1)
    for name in ("poetry", "business"):
        load(manager, name, adapters[name], engine.config)
        engine.add_request(name, PROMPT, GREEDY, adapter=name)
        done = run_to_end(engine)[name]
    assert tokens(done) == told_by_peft(base, adapters["business"], PROMPT, 8)


def test_a_slot_that_is_used_again_is_cleared(base):
    """Also where the next adapter has no factors: zero times what overflowed is no zero."""
    model, slots = adapted_model(base, max_loras=1)
    for layer in slots.layers.values():
        layer.down.fill_(torch.inf), layer.up.fill_(torch.inf)
    slots.write(0, by_hand(model.config))
    assert all(layer.down.isfinite().all() and layer.up.isfinite().all() for layer in slots.layers.values())


@torch.inference_mode()
def test_parts_of_a_fused_layer_change_their_own_rows():
    """As query and value of a Llama; each part has a rank below the slot's."""
    torch.manual_seed(0)
    rows, linear = GroupedRows(), torch.nn.Linear(6, 9)
    layer = LoRALinear(linear, rows, max_loras=2, num_parts=3, max_rank=4, like=linear.weight)
    query, value = (Factors(torch.randn(2, 6), torch.randn(3, 2), own) for own in (slice(0, 3), slice(6, 9)))
    layer.write(1, (query, value), scale=0.5)
    rows.fill([1], [0, 5])
    x = torch.randn(5, 6)
    added = layer(x) - linear(x)
    assert torch.allclose(added[:, :3], 0.5 * x @ query.A.T @ query.B.T, atol=1e-5), "the query's rows"
    assert not added[:, 3:6].any(), "rows between the parts stay as they are"
    assert torch.allclose(added[:, 6:], 0.5 * x @ value.A.T @ value.B.T, atol=1e-5), "the value's rows"


class Stepped(torch.nn.Module):
    """As a quantized layer: no nn.Linear, but it says `in_features` and `out_features`."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.steps, self.bias = (linear.weight * 32).round().to(torch.int8), linear.bias

    def forward(self, x):
        return torch.nn.functional.linear(x, self.steps.float() / 32, self.bias)


@torch.inference_mode()
def test_quantized_layers_are_wrapped_and_plain_ones_inside_are_packed(base, adapters, monkeypatch):
    """The order at load: quantize, wrap, pack."""

    def quantize(model):
        return replace_linears(model, lambda name, linear: Stepped(linear) if "mlp" in name else linear)

    def forms(linears, made, rows):
        return [0.5 if type(layer) is Transposed else 1.0 for layer in made]

    monkeypatch.setattr("engine.layers.packed_linear._seconds_per_layer", forms)
    slots = AdapterSlots(1, MAX_RANK, 16)
    model = load_model(base, transform=lambda m: pack_linears(slots.wrap(quantize(m))))
    block = model.blocks[0]
    assert isinstance(block.mlp.up, LoRALinear)
    assert isinstance(block.mlp.up.base, Stepped)
    assert isinstance(block.attention.qkv.base, Transposed), "packed inside its wrapper"
    assert not isinstance(model.head, LoRALinear), "the output layer sees other rows than the rest"
    adapter = read_adapter(adapters["poetry"], model.config)
    slots.write(0, adapter)
    slots.rows.fill([0], [0, 5])
    x = torch.randn(5, 48)
    (factors,) = adapter.layers["blocks.0.mlp.up"]
    want = block.mlp.up.base(x) + adapter.scale * (x @ factors.A.T @ factors.B.T)
    assert torch.allclose(block.mlp.up(x), want, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_slots_take_the_bytes_that_are_said_before(base, dtype):
    model, slots = load_model(base, dtype=dtype), AdapterSlots(3, MAX_RANK, max_tokens=8)
    said = slots.num_bytes(model)
    slots.wrap(model)
    assert said == sum(layer.down.nbytes + layer.up.nbytes for layer in slots.layers.values()) > 0


@pytest.mark.parametrize("field", ["max_loras", "max_lora_rank"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, None])
def test_a_number_of_slots_and_a_rank_are_whole_numbers(field, value):
    options = {"max_loras": 1, "max_lora_rank": 8} | {field: value}
    with pytest.raises(ValueError, match=f"{field}={value!r}"):
        AdapterSlots(**options, max_tokens=8)
