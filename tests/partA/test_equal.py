"""Two ranks give the tokens of one device: every claim on engines that are started once for a model."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from benchmarks.part20_models import random_model
from engine import LLM, SamplingParams
from engine.lora.request import LoRARequest
from engine.models.config import ModelConfig
from engine.requests.listeners import Listener
from tests.part01 import reference

peft = pytest.importorskip("peft", reason="needs the package peft, which makes an adapter")

SHAPE = {"vocab_size": 4096, "hidden_size": 64, "intermediate_size": 256, "max_position_embeddings": 256}
LONG = [7 * i % 1000 + 5 for i in range(70)]  # tokens: several chunks, and several blocks
PROMPTS = [LONG[:21], [9], LONG[10:40], LONG, [*LONG[:50], 8]]
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
SMALL = {"device": "cpu", "dtype": "float32", "max_num_batched_tokens": 32, "max_num_seqs": 6}
# Few blocks: requests are preempted. Swapped out and in again, or computed again.
SWAPPING = {"kv_cache_memory_bytes": 22, "swap_space": 0.1, "preemption_mode": "swap"}
RECOMPUTING = {"kv_cache_memory_bytes": 22, "preemption_mode": "recompute"}
ROOMY = {"kv_cache_memory_bytes": 200}
# With times that each engine measures for itself, the two could propose, and so preempt, unlike each other.
TIMES = {"step_times": {"sequences": [1], "drafts": [0, 1], "step_seconds": [[1.0, 1.0]]}}  # drafts are free
NGRAM = TIMES | {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
DRAFT = TIMES | {"model": "storyteller-draft", "num_speculative_tokens": 3}


@dataclass
class Case:
    """One composition of the engine, on one device and on two ranks."""

    family: str
    options: dict

    def names(self) -> str:
        chosen = self.options.get("quantization") or self.options.get("preemption_mode") or "plain"
        ahead = " ahead" if self.options.get("async_scheduling") else ""
        return f"{self.family} {chosen}{ahead}"


CASES = [
    Case("llama", SWAPPING | {"enable_lora": True, "max_lora_rank": 8}),
    Case("qwen3", RECOMPUTING | {"async_scheduling": True, "speculative_config": NGRAM}),
    Case("gpt2", ROOMY | {"speculative_config": DRAFT, "enable_lora": True, "async_scheduling": True}),
    Case("llama", ROOMY | {"quantization": "int8"}),
    Case("qwen3", ROOMY | {"quantization": "int4", "kv_cache": "slots", "max_model_len": 128}),
]


class Preemptions(Listener):
    """The lengths of the requests that were preempted."""

    def __init__(self, log: list[int]) -> None:
        self.log = log

    def on_preempt(self, request):
        self.log.append(len(request.token_ids))


@dataclass
class Pair:
    """The same engine on one device and on two ranks, and an adapter's folder."""

    one: LLM
    two: LLM
    adapter: Path

    def both(self, ask) -> list:
        """What `ask` returns for each of the two."""
        return [ask(self.one), ask(self.two)]


def checkpoint(family: str, folder: Path) -> Path:
    """A random model of this family with storyteller's tokenizer, whose every number counts."""
    if family == "gpt2":
        shape = {"n_embd": 64, "vocab_size": 4096, "n_positions": 256}
        return reference.save(reference.random_gpt2(**shape), folder, tokenizer=True)
    biases = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    return reference.save(random_model(family, **SHAPE, **heads, **biases), folder, tokenizer=True)


def adapter(model: Path, folder: Path) -> Path:
    """A random adapter of every layer, as PEFT saves it."""
    base = reference.load(str(model))
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
    peft.get_peft_model(base, config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=CASES, ids=Case.names)
def pair(request, tmp_path_factory, orders_are_read, forked_ranks) -> Iterator[Pair]:
    """The engines of one case, with as many blocks of 16 tokens: a rank's blocks take half the bytes."""
    case: Case = request.param
    folder = checkpoint(case.family, tmp_path_factory.mktemp("model"))
    options = SMALL | case.options
    blocks = options.pop("kv_cache_memory_bytes")
    of_model = ModelConfig.from_pretrained(folder).kv_bytes_per_token(4) * 16
    of_draft = 0
    if case.options.get("speculative_config") == DRAFT:  # its keys and values are whole, on rank 0
        of_draft = ModelConfig.from_pretrained("storyteller-draft").kv_bytes_per_token(4) * 16
    one = LLM(folder, **options, kv_cache_memory_bytes=blocks * (of_model + of_draft))
    num_bytes = blocks * (of_model // 2 + of_draft)
    two = LLM(folder, **options, kv_cache_memory_bytes=num_bytes, tensor_parallel_size=2)
    made = adapter(folder, tmp_path_factory.mktemp("adapter")) if options.get("enable_lora") else folder
    yield Pair(one, two, made)
    two.shutdown()


def ids(outputs) -> list[list[list[int]]]:
    return [[list(sample.token_ids) for sample in output.outputs] for output in outputs]


def asked(prompts=PROMPTS) -> list[dict]:
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def test_greedy_tokens(pair):
    """Prompts in chunks beside outputs, and more than there is room for at once."""
    one, two = pair.both(lambda llm: ids(llm.generate(asked() * 2, SamplingParams(**GREEDY), use_tqdm=False)))
    assert two == one


def test_seeds_and_several_samples(pair):
    params = SamplingParams(temperature=1, top_p=0.95, seed=5, n=3, max_tokens=12, ignore_eos=True)
    one, two = pair.both(lambda llm: ids(llm.generate(asked(), params, use_tqdm=False)))
    assert two == one
    assert len({tuple(sample) for samples in one for sample in samples}) > len(PROMPTS)


def test_penalties_read_on_the_host(pair):
    params = SamplingParams(**GREEDY, repetition_penalty=1.3, min_tokens=4)
    one, two = pair.both(lambda llm: ids(llm.generate(asked(), params, use_tqdm=False)))
    assert two == one


def test_words_that_are_bad_and_tokens_that_are_allowed(pair):
    """Rank 0 alone knows them, and every rank reads the tokens that they leave."""
    allowed = list(range(0, pair.one.engine.config.vocab_size, 2))
    params = SamplingParams(**GREEDY, allowed_token_ids=allowed, bad_words=["a", "the dog"])
    one, two = pair.both(lambda llm: ids(llm.generate(asked(), params, use_tqdm=False)))
    assert two == one
    assert {token_id % 2 for samples in one for sample in samples for token_id in sample} == {0}


def test_log_probabilities(pair):
    """Of chosen tokens and of prompts. Two terms that are added up differ from one sum in the last digits.
    With int8 on a CPU a layer codes its inputs by the largest of them, and each rank has some of the inputs.
    """
    params = SamplingParams(**GREEDY, logprobs=3, prompt_logprobs=2)

    def ask(llm) -> tuple[list, list[float]]:
        tokens, values = [], []
        for output in llm.generate(asked(PROMPTS[:3]), params, use_tqdm=False):
            scores = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
            tokens.append([list(score) for score in scores])
            values += [value.logprob for score in scores for value in score.values()]
        return tokens, values

    (tokens, values), (tokens_of_two, values_of_two) = pair.both(ask)
    assert tokens_of_two == tokens
    tolerance = 1e-2 if pair.one.args.quantization == "int8" else 2e-4
    assert values_of_two == pytest.approx(values, abs=tolerance)


def test_a_prefix_is_found_again(pair):
    if pair.one.args.kv_cache == "slots":
        pytest.skip("slots have no prefix cache")

    def ask(llm) -> list[int]:
        return [llm.generate(asked([LONG]), SamplingParams(**GREEDY), use_tqdm=False)[0] for _ in range(2)]

    for first, second in zip(*pair.both(ask), strict=True):
        assert (second.num_cached_tokens, ids([second])) == (first.num_cached_tokens, ids([first]))
    assert second.num_cached_tokens == 64


def test_a_preempted_request_goes_on(pair):
    """As often, and in the same way, as on one device."""
    if pair.one.args.preemption_mode is None:
        pytest.skip("there is room for all")
    seen = {"one": [], "two": []}

    texts = []
    for name, llm in (("one", pair.one), ("two", pair.two)):
        llm.engine.listeners.add(Preemptions(seen[name]))
        texts.append(
            ids(
                llm.generate(
                    asked([LONG, LONG[5:], LONG[9:], LONG[11:]] * 2),
                    SamplingParams(**GREEDY | {"max_tokens": 40}),
                    use_tqdm=False,
                )
            )
        )
    assert texts[1] == texts[0]
    assert seen["two"] == seen["one"] != []


def test_adapters_beside_requests_without_one(pair):
    if not pair.one.args.enable_lora:
        pytest.skip("this engine has no adapters")
    mine = LoRARequest("mine", 1, pair.adapter)

    def ask(llm) -> list:
        loras = [mine, None] * len(PROMPTS)
        return ids(
            llm.generate(
                [p for p in asked() for _ in loras[:2]],
                SamplingParams(**GREEDY),
                use_tqdm=False,
                lora_request=loras,
            )
        )

    one, two = pair.both(ask)
    assert two == one
    assert one[0::2] != one[1::2]


def test_a_stream_that_is_left_leaves_the_others_as_they_are(pair):
    def ask(llm) -> list:
        left = llm.stream({"prompt_token_ids": LONG}, SamplingParams(**GREEDY | {"max_tokens": 50}))
        stays = llm.stream({"prompt_token_ids": PROMPTS[0]}, SamplingParams(**GREEDY))
        for _ in range(4):
            next(left), next(stays)
        left.close()
        *_, last = stays
        return ids([last, *llm.generate(asked([LONG]), SamplingParams(**GREEDY), use_tqdm=False)])

    one, two = pair.both(ask)
    assert two == one
