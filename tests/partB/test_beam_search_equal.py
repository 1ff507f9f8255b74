"""`LLM.beam_search` finds what Hugging Face's `generate(num_beams=…)` finds, with the same scores."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from benchmarks.part20_models import random_model
from engine import LLM
from engine.lora.request import LoRARequest
from engine.sampling_params import BeamSearchParams
from tests.part01 import reference
from tests.partB.searching import assert_equal, theirs

ENDS = list(range(0, 300, 3))  # of the random models: one token in three ends an answer
PROMPTS = [[7 * i % 300 for i in range(1, 38)], [5], [250, 11, 3, 77, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 9]]


@dataclass
class Pair:
    """The same model twice."""

    llm: LLM
    hf: PreTrainedModel
    folder: Path | str


def random_pair(family: str, folder: Path, **options) -> Pair:
    if family == "gpt2":
        model = reference.random_gpt2(n_positions=128, eos_token_id=ENDS)
    else:
        model = random_model(family, max_position_embeddings=128, eos_token_id=ENDS)
    reference.save(model, folder, tokenizer=True)
    return Pair(LLM(folder, device="cpu", dtype="float32", **options), model, folder)


@pytest.fixture(scope="module")
def trained_pair() -> Pair:
    return Pair(LLM("storyteller"), reference.load("storyteller"), "storyteller")


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def pair(request, tmp_path_factory) -> Pair:
    return random_pair(request.param, tmp_path_factory.mktemp(request.param))


def assert_idle(llm: LLM) -> None:
    cache = llm.engine.scheduler.cache
    assert not any(cache.blocks.references), "blocks are left"
    assert [*llm.engine.scheduler.running, *llm.engine.scheduler.waiting] == [], "requests are left"


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize(("max_tokens", "penalty"), [(1, 1.0), (12, 1.0), (60, 1.0), (60, 0.0), (60, 2.0)])
def test_the_trained_model_finds_hugging_faces_answers(trained_pair, width, max_tokens, penalty):
    """Sixty tokens of storyteller pass its end-of-sequence token at times."""
    params = BeamSearchParams(width, max_tokens, length_penalty=penalty)
    prompt = trained_pair.llm.tokenizer.encode("The little cat was happy. They all went home.")
    ((output),) = trained_pair.llm.beam_search({"prompt_token_ids": prompt}, params)
    assert_equal(output.sequences, theirs(trained_pair.hf, prompt, params), len(prompt))
    assert_idle(trained_pair.llm)


@pytest.mark.parametrize(
    ("width", "penalty"),
    [(1, 1.0), (2, 1.0), (2, 0.0), (2, -1.0), (4, 1.0), (4, 3.0), (7, 1.0), (7, 0.0)],
)
def test_random_models_that_end_often_find_hugging_faces_answers(pair, width, penalty):
    params = BeamSearchParams(width, 24, length_penalty=penalty)
    outputs = pair.llm.beam_search(PROMPTS, params)
    ended = 0
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = theirs(pair.hf, prompt, params)
        assert_equal(output.sequences, expected, len(prompt))
        ended += sum(sequence.finish_reason == "stop" for sequence in output.sequences)
    assert ended, "no answer has ended by itself: the comparison says less than it should"
    assert_idle(pair.llm)


@pytest.mark.parametrize("width", [2, 5])
def test_without_an_end_every_answer_has_its_full_length(pair, width):
    params = BeamSearchParams(width, 20, ignore_eos=True)
    for prompt, output in zip(PROMPTS, pair.llm.beam_search(PROMPTS, params), strict=True):
        assert_equal(output.sequences, theirs(pair.hf, prompt, params), len(prompt))
        assert {len(sequence.tokens) - len(prompt) for sequence in output.sequences} == {20}


@pytest.mark.parametrize("options", [
    {"max_num_batched_tokens": 8, "max_num_seqs": 8},
    {"async_scheduling": True, "max_num_seqs": 4},
    {"enable_prefix_caching": False, "block_size": 32},
    {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
], ids=["small steps", "one step ahead", "no prefix cache", "n-grams"])  # fmt: skip
def test_an_engines_options_change_no_answer(tmp_path, options):
    pair = random_pair("llama", tmp_path, **options)
    params = BeamSearchParams(4, 16)
    before = pair.llm.generate(PROMPTS)
    for prompt, output in zip(PROMPTS, pair.llm.beam_search(PROMPTS, params), strict=True):
        assert_equal(output.sequences, theirs(pair.hf, prompt, params), len(prompt))
    assert_idle(pair.llm)
    assert len(pair.llm.generate(PROMPTS)) == len(before), "the engine serves requests afterwards"


def test_two_ranks_find_the_same(tmp_path, forked):
    params = BeamSearchParams(3, 8)
    pair = random_pair("llama", tmp_path, tensor_parallel_size=2)
    try:
        for prompt, output in zip(PROMPTS, pair.llm.beam_search(PROMPTS, params), strict=True):
            assert_equal(output.sequences, theirs(pair.hf, prompt, params), len(prompt))
    finally:
        pair.llm.shutdown()


def test_each_prompt_may_have_its_adapter(tmp_path):
    """Of two adapters with one slot, the second waits until the first is done."""
    peft = pytest.importorskip("peft", reason="needs the package peft, which makes an adapter")
    pair = random_pair("gpt2", tmp_path / "model", enable_lora=True, max_loras=1, max_lora_rank=8)
    params = BeamSearchParams(3, 12)
    requests, expected = [None], [theirs(pair.hf, PROMPTS[0], params)]
    for number in (1, 2):
        torch.manual_seed(number)
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
        adapted = peft.get_peft_model(reference.load(str(pair.folder)), config)
        adapted.save_pretrained(tmp_path / str(number))
        requests.append(LoRARequest(f"adapter {number}", number, str(tmp_path / str(number))))
        expected.append(theirs(adapted, PROMPTS[0], params))
    outputs = pair.llm.beam_search([PROMPTS[0]] * 3, params, lora_request=requests)
    for output, found, request in zip(outputs, expected, requests, strict=True):
        assert_equal(output.sequences, found, len(PROMPTS[0]))
        assert output.sequences[0].lora_request == request
    assert expected[0] != expected[1] != expected[2], "the adapters change nothing: this test says nothing"
    assert_idle(pair.llm)


def test_a_conversation_is_searched_as_its_tokens(trained_pair):
    tokenizer = trained_pair.llm.get_tokenizer()
    messages = [{"role": "user", "content": "Tell me a story about a dog."}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
    params = BeamSearchParams(3, 10)
    (output,) = trained_pair.llm.beam_search([{"prompt_token_ids": prompt}], params)
    assert_equal(output.sequences, theirs(trained_pair.hf, prompt, params), len(prompt))


def test_the_output_has_vllms_fields(trained_pair):
    llm = trained_pair.llm
    text = "Once upon a time"
    (output,) = llm.beam_search([{"prompt": text}], BeamSearchParams(beam_width=2, max_tokens=5))
    first = output.sequences[0]
    prompt = llm.tokenizer.encode(text)
    assert first.tokens[: len(prompt)] == prompt, "tokens are those of prompt and answer"
    assert first.text == llm.tokenizer.decode(first.tokens)
    assert first.text.startswith(text)
    assert first.orig_prompt == {"prompt_token_ids": prompt, "prompt": text}
    assert len(first.logprobs) == 5
    chosen = [scores[token].logprob for scores, token in zip(first.logprobs, first.tokens[len(prompt) :])]
    assert sum(chosen) == pytest.approx(first.cum_logprob)
    assert all(len(scores) >= 4 for scores in first.logprobs), "twice the width of likeliest tokens"
    assert (first.finish_reason, first.stop_reason, first.lora_request) == ("length", None, None)
