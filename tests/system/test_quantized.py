"""Quantized models in the finished engine: from `LLM` and `ruvon`, with what else there is switched on."""

from dataclasses import replace

import pytest

from benchmarks.part20_models import random_model
from engine import LLM, SamplingParams
from engine.models.loader import load_model
from engine.quantization.checkpoint import save_quantized
from engine.quantization.layers import LINEARS
from engine.quantization.quantize import quantize
from engine.speculation.measuring import ALWAYS_DRAFT
from engine.wiring.engine_args import EngineArgs, choices
from tests.part01 import reference
from tests.system.ready import ruvon

PROMPTS = ["Once upon a time", "Once upon a time there was a little girl named Lily", "The dog"]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


def texts(**options):
    llm = LLM("storyteller", max_num_seqs=4, max_model_len=128, **options)
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]


def test_the_names_that_are_accepted_are_those_of_the_part():
    declared = EngineArgs.__dataclass_fields__["quantization"].type
    assert set(choices(declared)) == {*LINEARS, None}


@pytest.mark.parametrize("method", LINEARS)
def test_other_capabilities_change_nothing(method):
    want = texts(quantization=method)
    for options in (
        {"kv_cache": "slots"},
        {"enable_prefix_caching": False, "block_size": 4, "max_num_batched_tokens": 8},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"async_scheduling": True},
    ):
        assert texts(quantization=method, **options) == want, f"{method} with {options}"


def test_a_saved_checkpoint_is_the_same_model(tmp_path):
    model = load_model("storyteller", transform=lambda model: quantize(model, "int4"))
    folder = save_quantized(model, "storyteller", tmp_path / "int4")
    for options in ({}, {"quantization": "int4"}):
        llm = LLM(folder, max_num_seqs=4, max_model_len=128, **options)
        got = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]
        assert got == texts(quantization="int4")
    with pytest.raises(ValueError, match="quantized already, by 'int4'"):
        LLM(folder, quantization="int8")


def test_ruvon_takes_it_as_a_flag():
    ask = "generate", "Once upon a time", "--max-tokens", "4", "--quantization"
    done = ruvon(*ask, "int8")
    assert done.returncode == 0, done.stderr
    assert "4 tokens" in done.stderr
    done = ruvon(*ask, "int3")
    assert done.returncode == 1
    assert "quantization='int3': accepted are int8, int4, int8_dynamic, None" in done.stderr


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("method", LINEARS)
def test_it_knows_no_architecture(tmp_path, family, method):
    source = reference.save(random_model(family, seed=3), tmp_path / "source", tokenizer=True)
    model = load_model(source, transform=lambda model: quantize(model, method))
    folder = save_quantized(model, source, tmp_path / "saved")
    options = {"max_num_seqs": 4, "kv_cache_memory_bytes": 2**21}
    prompts = [{"prompt_token_ids": ids} for ids in ([5, 6, 7, 5, 6, 7], [9], [3, 1, 4, 1, 5])]
    one, other = (
        [output.outputs[0].token_ids for output in LLM(name, **more, **options).generate(prompts, GREEDY)]
        for name, more in ((source, {"quantization": method}), (folder, {}))
    )
    assert one == other, "on load and from its own checkpoint: the same model"


SEEDED = SamplingParams(temperature=1.0, seed=7, max_tokens=60, ignore_eos=True)
EVERY_STEP = {"step_times": ALWAYS_DRAFT.as_dict()}  # as many drafts as may be
DRAFTS = {
    "no drafts": {},
    "n-grams": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3} | EVERY_STEP},
    "a model's": {
        "speculative_config": {"model": "storyteller-draft", "num_speculative_tokens": 3} | EVERY_STEP
    },
}


def seeded(seeds, **options):
    """The tokens of each seed after one prompt, all at once."""
    llm = LLM("storyteller", device="cpu", max_num_seqs=16, max_model_len=128, **options)
    asked = [replace(SEEDED, seed=seed) for seed in seeds]
    return [output.outputs[0].token_ids for output in llm.generate([PROMPTS[0]] * len(asked), asked)]


@pytest.mark.parametrize("method", ["int8", "int8_dynamic"])
def test_a_seed_tells_the_same_text_in_every_process(method):
    """The kernels are not equal to the last bit, so a clock must not choose among them."""
    ask = "generate", PROMPTS[0], "--max-tokens", "60", "--temperature", "1", "--seed", "7", "--device", "cpu"
    told = [ruvon(*ask, "--quantization", method) for _ in range(3)]
    assert [done.returncode for done in told] == [0] * 3, told[0].stderr
    assert len({done.stdout for done in told}) == 1


@pytest.mark.parametrize("method", [None, "int8"])
def test_a_seed_tells_in_a_crowd_and_with_drafts_what_it_tells_alone(method):
    """Sums in attention differ in their last bits, and a race may turn on that: one text of four may."""
    alone = [seeded([seed], quantization=method)[0] for seed in range(4)]
    for name, options in DRAFTS.items():
        crowd = seeded(range(4), quantization=method, **options)
        changed = sum(a != b for a, b in zip(alone, crowd, strict=True))
        assert changed <= 1, f"with {name}: {changed} of 4 texts changed"
