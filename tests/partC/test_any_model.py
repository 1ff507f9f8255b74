"""What works with Hugging Face's code as with ours, what is refused, and whose code never runs."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import LLM, EngineArgs, SamplingParams
from engine.attention.dense import causal
from engine.lora.request import LoRARequest
from engine.models import loader
from engine.models.checkpoint import CheckpointError
from engine.models.config import ModelConfig, architecture, architectures
from engine.models.loader import load_model
from engine.models.transformers_model import config_from
from engine.wiring.extensions import EXTENSIONS
from engine.wiring.loading import describe_implementation
from tests.partC.families import make

PROMPTS = ["Once upon a time there was a dog", "The", "A cat and a bird sat in the old tree"]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SMALL = {"device": "cpu", "max_num_seqs": 4, "kv_cache_memory_bytes": 2**22}


@torch.inference_mode()
def logits(model, ids):
    return model.logits(model(torch.tensor(ids), torch.arange(len(ids)), causal))


def tokens(llm, **options):
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False, **options)
    return [list(output.outputs[0].token_ids) for output in outputs]


def change_config(folder, **entries):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """(folder, Hugging Face's object)"""
    folder = tmp_path_factory.mktemp("llama")
    return folder, make("Llama", folder)


@pytest.fixture(scope="module")
def granite(tmp_path_factory):
    folder = tmp_path_factory.mktemp("granite")
    return folder, make("Granite", folder)


def test_auto_is_our_file_where_there_is_one_and_else_hugging_faces_code(llama, granite):
    assert ModelConfig.from_pretrained(llama[0]).model_impl == "ruvon"
    assert ModelConfig.from_pretrained(llama[0], "transformers").model_impl == "transformers"
    assert ModelConfig.from_pretrained(granite[0]).model_impl == "transformers"


def test_ruvon_alone_names_the_model_types_that_have_a_file(granite):
    with pytest.raises(CheckpointError, match=r"'granite' is not supported; supported: .*gpt2.*llama"):
        ModelConfig.from_pretrained(granite[0], "ruvon")


def test_the_module_for_any_model_is_no_model_type():
    assert "transformers_model" not in architectures()
    with pytest.raises(CheckpointError, match="'transformers_model' is not supported"):
        architecture("transformers_model", "ruvon")


def test_our_file_and_hugging_faces_code_give_the_same_tokens(llama):
    ours, theirs = (LLM(llama[0], model_impl=name, **SMALL) for name in ("ruvon", "transformers"))
    assert tokens(ours) == tokens(theirs)
    torch.testing.assert_close(
        logits(load_model(llama[0], model_impl="transformers"), range(40)),
        logits(load_model(llama[0]), range(40)),
        rtol=0, atol=1e-4,
    )  # fmt: skip


def test_it_is_said_whose_code_runs(llama, granite):
    assert describe_implementation(ModelConfig.from_pretrained(llama[0])) == "llama by ruvon"
    config = ModelConfig.from_pretrained(granite[0])
    assert describe_implementation(config) == "granite by transformers, without CUDA graphs"


def test_logits_are_capped_and_scaled_by_hugging_faces_own_code(granite):
    folder, theirs = granite
    ids = list(range(1, 9))
    want = theirs(torch.tensor([ids])).logits[0].detach()
    torch.testing.assert_close(logits(load_model(folder), ids), want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_its_linear_layers_are_quantized(granite, method):
    folder, _ = granite
    plain = logits(load_model(folder), range(1, 9))
    llm = LLM(folder, quantization=method, **SMALL)
    quantized = [type(module).__name__ for module in llm.engine.executor.ways[0].model.modules()]
    kind = {"int8": "Int8Linear", "int4": "Int4Linear"}[method]
    assert quantized.count(kind) >= 2 * 7, "each of the seven linear layers of both layers"
    got = logits(llm.engine.executor.ways[0].model, range(1, 9))
    difference = (got - plain).abs().max() / plain.abs().max()
    assert 0 < difference < {"int8": 0.05, "int4": 0.5}[method]
    assert all(len(ids) == 8 for ids in tokens(llm))


def test_experts_in_one_tensor_are_refused_rather_than_left_as_they_are(tmp_path):
    make("Mixtral", tmp_path)
    with pytest.raises(ValueError, match=r"quantization='int8': body.*experts.* is no linear layer's weight"):
        LLM(tmp_path, quantization="int8", **SMALL)


def test_an_adapter_gives_pefts_tokens_beside_requests_without(granite, tmp_path):
    peft = pytest.importorskip("peft")
    folder, _ = granite
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder).eval()
    settings = peft.LoraConfig(
        r=4, lora_alpha=16, target_modules=["q_proj", "down_proj"], init_lora_weights=False
    )
    torch.manual_seed(0)
    adapted = peft.get_peft_model(base, settings).eval()
    adapted.save_pretrained(tmp_path)
    llm = LLM(folder, enable_lora=True, max_lora_rank=4, **SMALL)
    plain = tokens(llm)
    request = LoRARequest("adapter", 1, str(tmp_path))
    mixed = tokens(llm, lora_request=[request, None, request])
    assert mixed[1] == plain[1], "a request without the adapter has the model's own tokens"
    for index in (0, 2):
        ids = llm.tokenizer.encode(PROMPTS[index])
        told = adapted(torch.tensor([ids + mixed[index]])).logits[0, len(ids) - 1 : -1].argmax(-1)
        assert mixed[index] == told.tolist()
        assert mixed[index] != plain[index]


def test_slots_serve_a_model_that_wants_no_more_than_queries_keys_and_values(granite):
    assert tokens(LLM(granite[0], kv_cache="slots", **SMALL)) == tokens(LLM(granite[0], **SMALL))


def test_steps_may_run_ahead(granite):
    assert tokens(LLM(granite[0], async_scheduling=True, **SMALL)) == tokens(LLM(granite[0], **SMALL))


@pytest.mark.parametrize("draft", ["n-grams", "a model"])
def test_drafts_change_no_token(granite, draft):
    folder, _ = granite
    proposer = {"method": "ngram"} if draft == "n-grams" else {"model": str(folder)}
    config = proposer | {"num_speculative_tokens": 3}
    assert tokens(LLM(folder, speculative_config=config, **SMALL)) == tokens(LLM(folder, **SMALL))


def test_noise_in_its_shape_runs_without_weights(granite, tmp_path):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((granite[0] / name).read_bytes())
    with pytest.raises(CheckpointError, match="no weights; looked for"):
        load_model(tmp_path)
    llm = LLM(tmp_path, load_format="dummy", **SMALL)
    assert llm.config.model_impl == "transformers"
    assert all(len(ids) == 8 for ids in tokens(llm))


def test_a_pickle_of_tensors_is_read_as_safetensors_are(granite, tmp_path):
    for path in granite[0].glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    torch.save(load_file(granite[0] / "model.safetensors"), tmp_path / "pytorch_model.bin")
    want = logits(load_model(granite[0]), range(9))
    torch.testing.assert_close(logits(load_model(tmp_path), range(9)), want, rtol=0, atol=0)


DAMAGES = {
    "missing": (lambda t: t.pop("model.norm.weight"), "missing tensor 'model.norm.weight'"),
    "unexpected": (lambda t: t.update(extra=torch.zeros(2)), "tensor 'extra' has no place in this model"),
    "misshapen": (
        lambda t: t.update({"model.norm.weight": torch.ones(65)}),
        r"tensor 'model.norm.weight' has shape \(65,\), the model needs \(64,\)",
    ),
    "not a number": (
        lambda t: t["model.norm.weight"].fill_(float("nan")),
        "tensor 'model.norm.weight' holds numbers that are not finite",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_tensor_is_refused_by_name(granite, tmp_path, damage):
    for path in granite[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    change, words = DAMAGES[damage]
    held = {name: tensor.clone() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    change(held)
    save_file(held, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=words):
        load_model(tmp_path)


def test_a_model_that_does_not_fit_is_refused_with_both_numbers(granite, monkeypatch):
    monkeypatch.setattr(loader, "available_memory", lambda: 1000)
    with pytest.raises(
        CheckpointError, match=r"weights need [\d,]{7,} bytes of memory, and cpu has 1,000 free"
    ):
        load_model(granite[0])


def test_a_quantized_checkpoint_is_refused(granite, tmp_path):
    for path in granite[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    change_config(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(
        CheckpointError, match="is quantized, and granite is computed by transformers; a plain"
    ):
        LLM(tmp_path, **SMALL)


def test_code_that_comes_with_a_checkpoint_is_never_run(granite, tmp_path):
    for path in granite[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    marker = tmp_path / "it_ran"
    code = f"open({str(marker)!r}, 'w').close()\n"
    for name in ("configuration_granite.py", "modeling_granite.py", "attention.py"):
        (tmp_path / name).write_text(code)
    change_config(
        tmp_path,
        auto_map={
            "AutoConfig": "configuration_granite.GraniteConfig",
            "AutoModelForCausalLM": "modeling_granite.GraniteForCausalLM",
        },
        attn_implementation="somebody/attention",
        _attn_implementation="somebody/attention",
    )
    assert tokens(LLM(tmp_path, **SMALL)) == tokens(LLM(granite[0], **SMALL))
    change_config(tmp_path, model_type="granite_of_ours")
    with pytest.raises(CheckpointError, match=r"code that comes with a checkpoint \(auto_map\) is never run"):
        LLM(tmp_path, **SMALL)
    assert not marker.exists()


def test_without_the_extension_the_option_is_refused_by_name(monkeypatch):
    monkeypatch.setitem(EXTENSIONS, "C", "no_such_extension")
    assert EngineArgs().model_impl == "auto"
    with pytest.raises(ValueError, match="model_impl='transformers': comes with Extension C"):
        EngineArgs(model_impl="transformers")


def test_without_the_library_the_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        CheckpointError, match=r"package transformers is missing: pip install.*supported: .*gpt2"
    ):
        config_from({"model_type": "granite", "num_hidden_layers": 3})


def test_another_value_of_the_option_is_refused():
    with pytest.raises(ValueError, match="model_impl='vllm': accepted are auto, ruvon, transformers"):
        EngineArgs(model_impl="vllm")


def test_a_token_past_the_vocabulary_is_refused_as_by_our_models(granite):
    with pytest.raises(ValueError, match="token id 4096 is out of range: this model has token ids 0 to 4095"):
        logits(load_model(granite[0]), [4096])


def test_the_librarys_settings_stay_as_they_are(granite):
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load_model(granite[0])
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_a_negative_token_id_is_refused_as_by_our_models(granite):
    with pytest.raises(ValueError, match="token id -1 is out of range: this model has token ids 0 to 4095"):
        logits(load_model(granite[0]), [3, -1, 4])
