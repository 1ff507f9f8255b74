"""A whole model: what becomes of its layers, its size, its perplexity, its text."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from engine.attention.dense import dense_attention
from engine.attention.interface import Spans
from engine.cache.memory import PageMemory
from engine.core.llm_engine import LLMEngine
from engine.decoding.params import SamplingParams
from engine.execution.runner import EagerWay, ModelRunner
from engine.layers.packed_linear import pack_linears
from engine.layers.replace import linear_names
from engine.models.loader import load_model
from engine.quantization.layers import LINEARS, Int4Linear, Int8Embedding, Int8Linear
from engine.quantization.quantize import QuantizationConfig, model_bytes, pack_quantized, quantize
from engine.scheduling.continuous import ContinuousScheduler
from engine.text.tokenizer import Tokenizer


def load(name, method, pack=True, **options):
    def transform(model):
        model = quantize(model, method, **options)
        return pack_quantized(pack_linears(model)) if pack else model

    return load_model(name, transform=transform)


@torch.inference_mode()
def hidden(model, ids):
    spans = Spans.of_one(len(ids), len(ids))

    def attend(layer, q, k, v):
        return dense_attention(q, k, v, spans)

    return model(torch.tensor(ids), torch.arange(len(ids)), attend)


@torch.inference_mode()
def perplexity(model, pieces):
    total, count = 0.0, 0
    for ids in pieces:
        scores = model.logits(hidden(model, ids))[:-1].float().log_softmax(1)
        total -= float(scores[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].sum())
        count += len(ids) - 1
    return math.exp(total / count)


@pytest.fixture(scope="module")
def pieces(data, checkpoint):
    ids = Tokenizer.from_pretrained(checkpoint).encode((data / "stories_val.txt").read_text()[:12_000])
    return [ids[start : start + 256] for start in range(0, len(ids) - 255, 256)]


@pytest.fixture(scope="module")
def plain(checkpoint, pieces):
    return perplexity(load_model(checkpoint), pieces)


@pytest.mark.parametrize(("method", "worse"), [("int8", 0.005), ("int8_dynamic", 0.02), ("int4", 0.04)])
def test_perplexity_of_held_out_stories(checkpoint, pieces, plain, method, worse):
    got = perplexity(load(checkpoint, method), pieces)
    assert got <= plain * (1 + worse), (
        f"{method}: {got:.4f} against {plain:.4f} in fp32, at most {worse:.1%} worse"
    )


@pytest.mark.parametrize(("method", "share"), [("int8", 0.30), ("int8_dynamic", 0.30), ("int4", 0.18)])
def test_size_of_the_whole_model(method, share):
    model = load("storyteller", method, pack=False)
    plain = model_bytes(load_model("storyteller"))
    check(model_bytes(model) / plain, share, method)
    if method != "int4":  # whose fastest kernel may want scales in fp32
        check(model_bytes(pack_quantized(model)) / plain, share, method + ", packed")


def check(part, share, method):
    assert part <= share, f"{method} takes {part:.1%} of fp32's bytes; {share:.0%} are accepted"


@pytest.mark.parametrize(("method", "kind"), LINEARS.items())
def test_every_linear_layer_and_embedding_is_replaced(tiny_gpt2, method, kind):
    model = load(tiny_gpt2, method, pack=False)
    names = linear_names(model)
    assert len(names) == 2 * 4 + 1
    assert all(isinstance(model.get_submodule(name), kind) for name in names[:-1])
    assert isinstance(model.embed, Int8Embedding)
    assert isinstance(model.embed_position, Int8Embedding)
    assert not any(isinstance(m, nn.Linear | nn.Embedding) for m in model.modules())
    assert model.blocks[0].norm1.weight.dtype == torch.float32, "norms stay as they are"
    assert model.quantization == QuantizationConfig(method)


@pytest.mark.parametrize("method", LINEARS)
def test_a_tied_head_shares_the_embeddings_codes(tiny_gpt2, method):
    model = load(tiny_gpt2, method, pack=False)
    assert isinstance(model.head, Int8Linear), "the head is in int8, whatever the method"
    assert not isinstance(model.head, Int4Linear)
    assert model.head.codes.data_ptr() == model.embed.codes.data_ptr(), "one table, kept once"
    before = load_model(tiny_gpt2)
    row = model.embed(torch.tensor([7]))
    step = before.embed.weight[7].abs().max() / 127
    assert (row - before.embed.weight[7]).abs().max() <= step * 0.501
    got, want = (m.logits(torch.eye(64)[:2]) for m in (model, before))
    assert torch.allclose(got, want, atol=0.05), "logits come from the same rows"


def test_an_untied_head_has_codes_of_its_own(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    shape = GPT2Config(
        vocab_size=40, n_embd=32, n_layer=1, n_head=2, n_positions=16, tie_word_embeddings=False
    )
    GPT2LMHeadModel(shape).save_pretrained(tmp_path)
    model, before = load(tmp_path, "int4", pack=False, group_size=32), load_model(tmp_path)
    step = before.head.weight.abs().amax(1, keepdim=True) / 127
    assert ((model.head.weight_in_fp32() - before.head.weight).abs() <= step * 0.501).all()


@pytest.mark.parametrize("method", LINEARS)
def test_a_token_beyond_the_table_is_refused_in_words(tiny_gpt2, method):
    model = load(tiny_gpt2, method)
    with pytest.raises(ValueError, match="token id 4096 is out of range"):
        hidden(model, [4096])


@pytest.mark.parametrize("method", LINEARS)
def test_packing_reaches_into_wrappers_and_may_be_asked_for_twice(tiny_gpt2, method):
    class Wrapper(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base

        def forward(self, x):
            return self.base(x)

    model = load(tiny_gpt2, method, pack=False)
    model.blocks[0].mlp.up = Wrapper(model.blocks[0].mlp.up)
    want = model.logits(hidden(model, [1, 2, 3]))
    pack_quantized(pack_linears(model))
    assert model.blocks[0].mlp.up.base.product is not None, "what is inside a wrapper is packed, too"
    assert pack_quantized(model) is model
    assert torch.allclose(model.logits(hidden(model, [1, 2, 3])), want, atol=0.3)


def run(model, prompts, together):
    """Greedy tokens, through pages, chunks and a shared prefix."""
    tokenizer = Tokenizer.from_pretrained("storyteller")
    memory = PageMemory(model.config, 64, 8)
    scheduler = ContinuousScheduler(memory.plan(), together, 24)
    runner = ModelRunner([EagerWay(model, memory)], memory)
    engine = LLMEngine(tokenizer, model.config, scheduler, runner, max_model_len=256)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    found = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            found[output.request_id] = output.outputs[0].token_ids
    return [found[str(i)] for i in range(len(prompts))]


@pytest.mark.parametrize("method", LINEARS)
def test_a_request_in_a_mixed_batch_equals_the_same_request_alone(method):
    model = load("storyteller", method)
    prompts = [
        "Once upon a time",
        "Once upon a time there was a dog named Max. He had a red ball",
        "Lily",
    ]
    assert run(model, prompts, 3) == [run(model, [prompt], 1)[0] for prompt in prompts]


def test_unknown_names_are_refused():
    model = nn.Linear(2, 2)
    with pytest.raises(
        ValueError, match=r"quantization='int3': accepted are int8, int4, int8_dynamic, or None"
    ):
        quantize(model, "int3")
    with pytest.raises(ValueError, match=r"group_size=48: accepted are 32, 64, 128"):
        quantize(model, "int4", 48)
    for method in ("int8", "int8_dynamic"):
        with pytest.raises(ValueError, match=f"group_size=32: {method} has no groups, only int4 has"):
            quantize(model, method, 32)


def test_activations_become_codes_on_a_cpu_only():
    with pytest.raises(ValueError, match="int8_dynamic' runs on a CPU, not on meta: use int8 there"):
        quantize(nn.Linear(2, 2, device="meta"), "int8_dynamic")


def test_what_is_quantized_already_stays_or_is_refused(tiny_gpt2):
    model = load(tiny_gpt2, "int4", pack=False, group_size=32)
    assert quantize(model, "int4") is model
    with pytest.raises(ValueError, match="quantized already, by 'int4' with group_size=32"):
        quantize(model, "int8")
    with pytest.raises(ValueError, match="quantized already"):
        quantize(model, "int4", 64)


@pytest.mark.parametrize("method", ["int8", "int4"])
@pytest.mark.parametrize("tied", [True, False])
def test_only_a_tied_head_in_four_bits_gets_no_layout_of_its_own(tiny_gpt2, monkeypatch, method, tied):
    model, asked = load(tiny_gpt2, method, pack=False), {}
    model.config = replace(model.config, tie_word_embeddings=tied)
    for kind in {type(layer) for layer in model.modules() if isinstance(layer, tuple(LINEARS.values()))}:
        monkeypatch.setattr(kind, "pack", lambda self, may_repack: asked.update({id(self): may_repack}))
    pack_quantized(model)
    assert asked.pop(id(model.head)) == (not tied or method != "int4"), "memory comes first, with int4"
    assert all(asked.values()), "other layers' codes are read by nobody else"


def test_a_table_gives_numbers_of_the_models_dtype():
    table = Int8Embedding(4, 8, torch.device("cpu"), torch.bfloat16)
    table.set_weight(torch.randn(4, 8))
    assert table(torch.tensor([1, 2])).dtype == torch.bfloat16


def test_kernels_that_read_weights_themselves_leave_quantized_layers_alone(tiny_gpt2):
    pytest.importorskip("triton", reason="needs the package triton")
    from engine.kernels.single_row import SingleRow

    assert SingleRow.fits(load_model(tiny_gpt2))
    assert not SingleRow.fits(load(tiny_gpt2, "int8", pack=False)), "their weights are codes"


def test_weights_in_a_kernels_own_layout_are_counted(tiny_gpt2):
    model = load(tiny_gpt2, "int8_dynamic")
    weights = sum(
        layer.in_features * layer.out_features for layer in map(model.get_submodule, linear_names(model))
    )
    assert model_bytes(model) >= weights, "a byte each, though the codes themselves may have gone"
