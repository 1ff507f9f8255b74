"""A caller's SamplingParams may be changed at any time: a request under way has a copy."""

from engine.decoding.params import SamplingParams
from tests.part06.fakes import run_to_end, told_alone


def test_a_request_does_not_change_with_its_callers_params(fake_engine):
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True, logit_bias={65: 4.0})
    expected = told_alone("hello", params.clone()).token_ids
    engine = fake_engine()
    engine.add_request("a", "hello", params)
    engine.step()
    params.max_tokens, params.temperature, params.stop, params.seed = 2, 0, ["a", "e"], 4
    params.logit_bias[65] = -100.0
    output = run_to_end(engine)["a"].outputs[0]
    assert (output.token_ids, output.finish_reason) == (expected, "length")


def test_one_object_serves_several_requests_with_changes_between_them(fake_engine):
    params, engine = SamplingParams(temperature=0, ignore_eos=True), fake_engine()
    for length in (2, 5, 3):
        params.max_tokens = length
        engine.add_request(str(length), "hello", params)
    outputs = run_to_end(engine)
    assert [len(outputs[name].outputs[0].token_ids) for name in ("2", "5", "3")] == [2, 5, 3]


def test_samples_of_one_request_keep_the_rules_together(fake_engine):
    """bad_words, allowed_token_ids, n and seeds: each sample is what the loop of Part 2 says alone."""
    params = SamplingParams(
        n=3, seed=5, max_tokens=20, ignore_eos=True, allowed_token_ids=[*b"abc"], bad_words=["ab", "cc"]
    )
    engine = fake_engine()
    engine.add_request("a", "hello", params)
    outputs = run_to_end(engine)["a"].outputs
    for index, sample in enumerate(outputs):
        assert sample.token_ids == told_alone("hello", params, index).token_ids
        assert set(sample.text) <= set("abc")
        assert "ab" not in sample.text
        assert "cc" not in sample.text
    assert len({sample.text for sample in outputs}) == 3


def test_a_request_that_forbids_every_token_fails_alone(fake_engine):
    engine = fake_engine()
    engine.add_request(
        "none", "hello", SamplingParams(allowed_token_ids=[97], bad_words=["aa"], max_tokens=5)
    )
    engine.add_request("free", "hello", SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    outputs = run_to_end(engine)
    assert outputs["none"].error is not None
    assert "the request forbids all tokens" in outputs["none"].error
    assert outputs["none"].outputs[0].text == "a"
    assert outputs["free"].error is None


def test_a_truncated_prompt_is_what_the_model_reads(fake_engine):
    engine = fake_engine()
    engine.add_request("a", "x" * 500 + "hello", SamplingParams(temperature=0, truncate_prompt_tokens=5))
    output = run_to_end(engine)["a"]
    assert output.prompt_token_ids == [*b"hello"]
    assert output.outputs[0].token_ids == told_alone("hello", SamplingParams(temperature=0)).token_ids
