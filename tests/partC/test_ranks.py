"""Several ranks share a model that Hugging Face's code computes, or it is refused by name."""

from pathlib import Path
from threading import Barrier, Thread

import pytest
import torch

from benchmarks.partC_models import SMALL as SHAPE
from engine import LLM, SamplingParams
from engine.attention.extras import causal
from engine.lora.adapter import Adapter, Factors, targets_of
from engine.lora.slots import AdapterSlots
from engine.models.checkpoint import CheckpointError
from engine.models.config import ModelConfig
from engine.models.loader import load_model
from engine.models.transformers_model import config_from
from engine.parallel.launch import Workers
from engine.parallel.layers import sum_over_ranks
from engine.parallel.shards import Shards, accepted_sizes, cut, divide
from engine.quantization.quantize import quantize
from tests.partC.families import EQUAL, SHARED, make
from tests.partC.test_families import PROMPTS, SMALLEST_GAP, likeliest

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
CHUNKED = {"device": "cpu", "max_num_batched_tokens": 8, "max_num_seqs": 4, "block_size": 4}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}
# What two processes compute, and with which options of the engine.
STARTED = {
    "Llama": {},
    "Qwen2, Qwen2.5": {"speculative_config": NGRAM},
    "Gemma": {"async_scheduling": True},
    "SmolLM3": {},
    "Granite": {"kv_cache": "slots", "block_size": None, "max_model_len": 64},
}


def load(folder, rank=None, **options):
    sharding = None if rank is None else Shards(rank, 2)
    return load_model(folder, model_impl="transformers", sharding=sharding, **options)


def config_of(name) -> ModelConfig:
    """The config of a family's tiny model, without its weights."""
    from transformers import CONFIG_MAPPING

    model_type, settings = EQUAL[name]
    return config_from(CONFIG_MAPPING[model_type](**SHAPE | settings).to_dict())


class Group:
    """Rank `rank` of two, which are threads of this process."""

    size = 2

    def __init__(self, rank, terms, barrier):
        self.rank, self.terms, self.barrier = rank, terms, barrier

    def all_reduce_sum(self, x):
        self.terms[self.rank] = x
        self.barrier.wait()
        total = self.terms[0] + self.terms[1]
        self.barrier.wait()
        return total


def together(parts, ids):
    """hidden[T, D] of two parts that sum, as rank 0 has it, and rank 0's logits[T, V]."""
    terms, barrier, results = [None, None], Barrier(2, timeout=240), [None, None]

    def run(rank):
        model = sum_over_ranks(parts[rank], Group(rank, terms, barrier))
        with torch.inference_mode():
            hidden = model(torch.tensor(ids), torch.arange(len(ids)), causal)
            results[rank] = hidden, model.logits(hidden)

    threads = [Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (hidden, logits), (second, no_logits) = results
    assert torch.equal(hidden, second), "behind a sum, every rank has the same numbers"
    assert no_logits.shape == (len(ids), 0), "only rank 0 keeps the output layer"
    return hidden, logits


@torch.inference_mode()
def alone(model, ids):
    hidden = model(torch.tensor(ids), torch.arange(len(ids)), causal)
    return hidden, model.logits(hidden)


@pytest.mark.parametrize("name", SHARED)
def test_two_parts_compute_what_the_whole_computes(name, tmp_path):
    make(name, tmp_path)
    whole, parts = load(tmp_path), [load(tmp_path, rank) for rank in range(2)]
    of_whole, *of_parts = ({n: p.numel() for n, p in m.body.named_parameters()} for m in (whole, *parts))
    for of_part in of_parts:
        assert of_part.keys() == of_whole.keys()
        blocks = [n for n in of_part if ".linear." in n or ".rowwise." in n]
        matrices = [n for n in blocks if n.endswith("weight")]
        assert len(matrices) >= 2 * 4
        assert all(2 * of_part[n] == of_whole[n] for n in matrices), "a rank holds half of every layer"
    part = parts[0].config
    for field in ("num_heads", "num_kv_heads", "intermediate_size"):
        assert 2 * getattr(part, field) == getattr(whole.config, field)
    ids = [5, 60, 7, 5, 9, 60, 61, 62, 63, 64, 65, 2]  # more than a window
    for told, want in zip(together(parts, ids), alone(whole, ids), strict=True):
        torch.testing.assert_close(told, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


def test_two_parts_of_an_adapter_change_what_the_whole_changes(tmp_path):
    """Layers that are cut by their outputs have a part of B, those that are cut by their inputs of A."""
    make("Granite", tmp_path)
    torch.manual_seed(1)
    config = ModelConfig.from_pretrained(tmp_path)
    layers = {}
    for target in targets_of(config).values():
        out, wide = target.shape
        layers[target.layer] = (Factors(torch.randn(2, wide), torch.randn(out, 2)),)
    adapter, ids = Adapter(2, 0.3, layers), [5, 6, 7, 5]
    plain, _ = alone(load(tmp_path), ids)
    models = [load(tmp_path), load(tmp_path, 0), load(tmp_path, 1)]
    for model, rank in zip(models, (None, 0, 1), strict=True):
        shards = Shards(rank or 0, 2)
        shards.config(config)
        slots = AdapterSlots(1, 2, 8, None if rank is None else shards.adapter)
        slots.wrap(model)
        slots.write(0, adapter)
        slots.rows.fill([0], [0, 4])
    want, _ = alone(models[0], ids)
    assert not torch.allclose(want, plain, atol=0.1), "the adapter counts"
    told, _ = together(models[1:], ids)
    torch.testing.assert_close(told, want, rtol=1e-3, atol=1e-3)


def test_the_codes_of_a_part_are_those_of_the_whole(tmp_path):
    """A row that several ranks have parts of is scaled by its largest number, whoever has it."""
    make("Granite", tmp_path)
    plain, whole = load(tmp_path), quantize(load(tmp_path), "int8")

    def largest(name, weight):
        return plain.get_submodule(name).weight.abs().amax(1) if name.endswith("rowwise") else None

    for rank in range(2):
        part = quantize(load(tmp_path, rank), "int8", row_max=largest)
        for name, dim in {"self_attn.q_proj.linear": 0, "mlp.down_proj.rowwise": 1}.items():
            mine, all_codes = (m.get_submodule(f"body.layers.1.{name}") for m in (part, whole))
            assert torch.equal(mine.codes, cut(all_codes.codes, dim, rank, 2))


def test_noise_in_a_parts_shape_needs_no_whole_model(tmp_path):
    make("Granite", tmp_path)
    whole, part = (load(tmp_path, rank, load_format="dummy") for rank in (None, 1))
    numbers = [sum(p.numel() for p in model.body.layers.parameters()) for model in (whole, part)]
    assert numbers[1] < 0.52 * numbers[0]


@pytest.mark.parametrize("name", STARTED)
def test_two_processes_give_one_devices_tokens_and_hugging_faces(name, tmp_path, forked):
    """Greedy, three requests at once, prompts in chunks; then again, from the prefix cache."""
    theirs = make(name, tmp_path)
    theirs.set_attn_implementation("eager")
    of_token = ModelConfig.from_pretrained(tmp_path, "transformers").kv_bytes_per_token(4)
    tokens = {}
    for size in (1, 2):  # as many blocks: those of a rank take half of the bytes
        llm = LLM(
            tmp_path, model_impl="transformers", tensor_parallel_size=size,
            kv_cache_memory_bytes=256 * of_token // size, **CHUNKED | STARTED[name],
        )  # fmt: skip
        try:
            outputs = [llm.generate(PROMPTS, GREEDY, use_tqdm=False) for _ in range(2)]
            tokens[size] = [[list(o.outputs[0].token_ids) for o in several] for several in outputs]
        finally:
            llm.shutdown()
    assert tokens[2] == tokens[1], "two ranks choose other tokens than one device"
    for output in outputs[0]:
        ids = list(output.outputs[0].token_ids)
        told, gap = likeliest(theirs, list(output.prompt_token_ids), ids)
        assert gap > SMALLEST_GAP, f"the likeliest two differ by {gap:.2g}: choose another seed"
        assert ids == told, "two ranks choose other tokens than Hugging Face's generate"


# Of EQUAL, what one device computes and ranks do not share -> words of the refusal.
WHOLE_ONLY = {
    "Qwen3-MoE": "has 'packed_colwise' for layers.0.mlp.experts.gate_up_proj (Parameter)",
    "Mixtral": "has 'packed_colwise' for layers.0.mlp.experts.gate_up_proj (Parameter)",
    "Phi-3": "has 'colwise_gather_output' for layers.0.self_attn.qkv_proj; 'colwise' and 'rowwise'",
    "Phi-3, long": "has 'colwise_gather_output' for layers.0.self_attn.qkv_proj",
    "OLMo 2": "has 'colwise_gather_output' for layers.0.self_attn.q_proj",
    "OLMo 3": "has 'colwise_gather_output' for layers.0.self_attn.q_proj",
    "GPT-2": "has no plan for several ranks of it (base_model_tp_plan)",
    "OPT": "has no plan",
    "OPT, projected embeddings": "has no plan",
    "StarCoder (one key head)": "has no plan",
    "gpt-oss": "has no plan",
    "StableLM": "has no plan",
    "GLM 4": "has 'colwise_gather_output' for layers.0.mlp.gate_up_proj",
    "OLMoE": "has 'colwise_gather_output' for layers.0.self_attn.q_proj",
    "Phi-3.5-MoE": "has 'packed_colwise' for layers.0.mlp.experts.gate_up_proj (Parameter)",
    "DeepSeek-V3": "has 'packed_colwise' for layers.1.mlp.experts.gate_up_proj (Parameter)",
}


def test_each_family_is_shared_or_refused():
    assert sorted([*SHARED, *WHOLE_ONLY]) == sorted(EQUAL)


@pytest.mark.parametrize("name", WHOLE_ONLY)
def test_a_plan_of_more_than_colwise_and_rowwise_is_refused_by_name(name):
    config = config_of(name)
    for size in (2, 3):  # for 3 it would be no help to say which sizes divide the heads
        with pytest.raises(CheckpointError) as refusal:
            divide(config, size)
        message = str(refusal.value)
        assert message.startswith(
            f"tensor_parallel_size={size}: {config.model_type} is computed by transformers, wh"
        )
        assert WHOLE_ONLY[name] in message
        assert "\n" not in message


def test_heads_that_do_not_divide_are_named_with_what_would():
    config = config_of("Granite")
    with pytest.raises(CheckpointError, match=r"=4 does not divide num_kv_heads=2; accepted .* are 1, 2$"):
        divide(config, 4)
    assert accepted_sizes(config) == [1, 2]


def test_a_model_that_its_plan_does_not_fit_is_refused_by_the_trial():
    """Cohere's plan is silent about norms with a row for each head, which some of its models have."""
    from transformers import CohereConfig

    config = config_from(CohereConfig(**SHAPE, use_qk_norm=True).to_dict())
    with pytest.raises(CheckpointError, match="and in 2 parts it does not run: a trial pass failed"):
        divide(config, 2)


def test_a_plan_in_config_json_has_no_say():
    raw = config_of("Phi-3").raw
    plan = {"layers.*.self_attn.qkv_proj": "colwise", "layers.*.self_attn.o_proj": "rowwise"}
    with pytest.raises(CheckpointError, match=r"'colwise_gather_output' for layers\.0\.self_attn\.qkv_proj"):
        divide(config_from(raw | {"base_model_tp_plan": plan}), 2)


def test_what_cannot_be_shared_is_refused_before_a_process_is_started(tmp_path, monkeypatch):
    def start(*_):
        raise AssertionError("a process was started")

    monkeypatch.setattr(Workers, "__init__", start)
    make("Phi-3", tmp_path)
    with pytest.raises(CheckpointError, match="tensor_parallel_size=2: phi3 is computed by transformers"):
        LLM(tmp_path, tensor_parallel_size=2, device="cpu")


def test_the_article_names_the_families():
    article = Path(__file__).parents[2] / "articles" / "C_any_model.md"
    names = "; ".join(SHARED)
    assert names in article.read_text(encoding="utf-8"), f"the article's list is another than: {names}"
