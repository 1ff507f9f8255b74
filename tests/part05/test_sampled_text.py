"""Sampling in Part 2's loop and behind Part 4's server: seeds, n samples, which fields have their effect."""

import asyncio
from itertools import count

import pytest

from engine.cache.single import CachedForward
from engine.decoding import greedy
from engine.decoding.greedy import decode_steps
from engine.decoding.params import ParameterError, SamplingParams
from engine.decoding.refusals import refuse_unsupported
from engine.decoding.sampling import SUPPORTS, sampler
from engine.decoding.sampling_state import seed_of
from engine.server.app import create_app
from engine.server.backend import LockedBackend
from tests.part04.serving import openai_client, serve

PROMPT = "Once upon a time"
FIELDS = {
    "temperature": 0.7,
    "top_k": 5,
    "top_p": 0.9,
    "min_p": 0.1,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "logit_bias": {5: 1.0},
    "allowed_token_ids": [5, 6],
    "seed": 7,
    "n": 3,
}


@pytest.fixture(scope="module")
def tell(model, tokenizer):
    """tell(params, index) -> token ids of one story."""

    def run(params, index=0, prompt=PROMPT):
        ids = tokenizer.encode(prompt)
        choose = sampler(params, ids, index)
        steps = decode_steps(CachedForward(model), tokenizer, model.config, ids, params, choose, SUPPORTS)
        return [step.token_id for step in steps]

    return run


@pytest.fixture(scope="module")
def backend(model, tokenizer):
    return LockedBackend("stories", tokenizer, model.config, lambda: CachedForward(model), sampler, SUPPORTS)


@pytest.fixture(scope="module")
def client(backend):
    with serve(create_app(backend)) as url, openai_client(url) as client:
        yield client


def test_the_same_seed_tells_the_same_story_and_another_seed_another(tell):
    stories = [tuple(tell(SamplingParams(seed=seed, max_tokens=30))) for seed in (1, 2, 3, 1)]
    assert stories[0] == stories[3]
    assert len(set(stories)) == 3


def test_a_request_without_a_seed_is_different_every_time(tell):
    assert len({tuple(tell(SamplingParams(max_tokens=30))) for _ in range(3)}) == 3
    assert len({seed_of(SamplingParams()) for _ in range(100)}) == 100


def test_temperature_zero_in_the_loop_is_greedy(tell, alone):
    params = SamplingParams(temperature=0, max_tokens=40)
    assert tell(params) == alone(PROMPT, params).token_ids


def test_a_low_temperature_comes_close_to_greedy_and_top_k_one_is_it(tell, alone):
    expected = alone(PROMPT, SamplingParams(temperature=0, max_tokens=30)).token_ids
    assert tell(SamplingParams(temperature=5.0, top_k=1, seed=1, max_tokens=30)) == expected
    assert tell(SamplingParams(temperature=1e-40, seed=1, max_tokens=30)) == expected


def test_sample_i_of_a_seed_is_the_first_sample_of_that_seed_plus_i(tell):
    for index in range(3):
        assert tell(SamplingParams(seed=10, n=3, max_tokens=15), index) == tell(
            SamplingParams(seed=10 + index, max_tokens=15)
        )


def test_a_penalty_against_presence_gives_fewer_repetitions(tell):
    plain = tell(SamplingParams(temperature=0, max_tokens=80))
    varied = tell(SamplingParams(temperature=0, presence_penalty=2.0, frequency_penalty=2.0, max_tokens=80))
    assert len(set(varied)) / len(varied) > len(set(plain)) / len(plain)


def test_logit_bias_bans_a_token_for_the_whole_story(tell):
    plain = tell(SamplingParams(temperature=0, max_tokens=30))
    banned = plain[5]
    assert banned not in tell(SamplingParams(temperature=0, logit_bias={banned: -100}, max_tokens=60))


def test_min_tokens_holds_in_a_sampled_story(tell, model):
    eos = model.config.eos_token_ids[0]
    bias = {eos: 100}
    assert tell(SamplingParams(seed=1, logit_bias=bias, max_tokens=20)) == [eos]
    told = tell(SamplingParams(seed=1, logit_bias=bias, max_tokens=20, min_tokens=6))
    assert len(told) == 7
    assert told.index(eos) == 6


def test_n_choices_come_in_order_and_are_what_each_would_be_alone(client, tell, tokenizer):
    answer = client.completions.create(
        model="stories", prompt=[PROMPT, "The cat"], n=3, seed=5, max_tokens=12, temperature=0.9
    )
    params = SamplingParams(n=3, seed=5, max_tokens=12, temperature=0.9)
    expected = [
        tokenizer.decode(tell(params, index, prompt)) for prompt in (PROMPT, "The cat") for index in range(3)
    ]
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == expected
    assert len(set(expected)) == 6
    assert answer.usage.completion_tokens == 6 * 12


def test_streamed_n_choices_are_the_same(client):
    ask = {"model": "stories", "prompt": PROMPT, "n": 3, "seed": 5, "max_tokens": 12}
    whole = client.completions.create(**ask)
    texts = {0: "", 1: "", 2: ""}
    finished = []
    for chunk in client.completions.create(stream=True, **ask):
        texts[chunk.choices[0].index] += chunk.choices[0].text
        finished += [chunk.choices[0].index] * (chunk.choices[0].finish_reason is not None)
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert sorted(finished) == [0, 1, 2]


def test_temperature_is_one_when_not_given(client, tell, tokenizer):
    answer = client.completions.create(model="stories", prompt=PROMPT, seed=3, max_tokens=12)
    assert answer.choices[0].text == tokenizer.decode(
        tell(SamplingParams(seed=3, temperature=1, max_tokens=12))
    )


def test_best_of_equal_to_n_is_accepted(client):
    answer = client.completions.create(model="stories", prompt=PROMPT, n=2, best_of=2, max_tokens=2)
    assert len(answer.choices) == 2


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_of_this_part_is_refused_before_it_and_has_its_effect_now(field):
    params = SamplingParams(**{field: FIELDS[field]})
    with pytest.raises(ParameterError, match="Part 5") as caught:
        refuse_unsupported(params, greedy.SUPPORTS)
    assert caught.value.field == field
    refuse_unsupported(params, SUPPORTS)


def test_the_supported_fields_are_exactly_those_of_this_part():
    assert set(FIELDS) == SUPPORTS
    with pytest.raises(ParameterError, match="Part 10"):
        refuse_unsupported(SamplingParams(logprobs=1), SUPPORTS)


def test_aborting_in_the_middle_of_n_samples_ends_them_all(backend):
    async def run():
        outputs = await backend.generate(PROMPT, SamplingParams(n=3, seed=1, max_tokens=10), "0")
        for turn in count():
            output = await anext(outputs)
            if turn == 12:
                await backend.abort("0")
            if output.finished:
                return output

    output = asyncio.run(run())
    assert [sample.finish_reason for sample in output.outputs] == ["length", "abort"]
