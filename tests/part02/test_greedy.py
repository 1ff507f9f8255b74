"""The loop: token for token what Hugging Face's greedy search gives, and what it does at each turn."""

import pytest
import torch

from engine.decoding.greedy import FullForward, _decode, argmax, decode_steps, generate, top_candidates
from engine.decoding.params import ParameterError, SamplingParams
from engine.decoding.stopping import GrowingOutput
from engine.models.config import ModelConfig
from engine.models.loader import load_model
from engine.text.tokenizer import Tokenizer
from tests.part01 import reference
from tests.part01.outcome import difference

CONFIG = ModelConfig(
    model_type="mock", vocab_size=258, hidden_size=1, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=1,
    intermediate_size=1, max_positions=20, norm_eps=1.0, activation="none", tie_word_embeddings=True,
    eos_token_ids=(256,),
)  # fmt: skip
PROMPTS = [
    "Once upon a time",
    "The dragon said:",
    "Tom and Lily went to the park. They saw a big",
    "<|user|>Tell me a story about a dog and a red ball<|assistant|>",
    "日本",
]


class Scripted:
    """A `forward` that wants the given tokens one after the other, and notes what it was asked."""

    def __init__(self, text: str | list[int], second: int = 120) -> None:
        self.script = list(text.encode()) if isinstance(text, str) else text
        self.second = second  # the runner-up, wherever the first is banned
        self.calls: list[list[int]] = []

    def __call__(self, token_ids) -> torch.Tensor:
        self.calls.append(list(token_ids))
        turn = len(self.calls) - 1
        assert turn < len(self.script) + 3, (
            "the loop does not end: no finish reason is heard, or a token stays banned for ever"
        )
        logits = torch.zeros(258)
        logits[self.second] = 1.0
        logits[self.script[min(turn, len(self.script) - 1)]] = 2.0
        return logits


def steps_of(forward, tokenizer, prompt=(1,), **settings):
    params = SamplingParams(**{"temperature": 0, "max_tokens": None} | settings)
    return list(decode_steps(forward, tokenizer, CONFIG, list(prompt), params))


def run(forward, tokenizer, prompt=(1, 2), config=CONFIG, **settings):
    params = SamplingParams(**{"temperature": 0, "max_tokens": None} | settings)
    return generate(forward, tokenizer, config, list(prompt) if isinstance(prompt, tuple) else prompt, params)


def smallest_gap(model, prompt: list[int], output: list[int]) -> float:
    """How far the two likeliest tokens were apart at the closest of all choices."""
    rows = reference.logits(model, prompt + output)[len(prompt) - 1 : -1]
    return (rows.topk(2).values @ torch.tensor([1.0, -1.0])).min().item()


def test_each_turn_reads_the_prompt_and_all_ids_so_far(byte_tokenizer):
    forward = Scripted("aé")
    run(forward, byte_tokenizer, max_tokens=3)
    want = [[1, 2], [1, 2, 97], [1, 2, 97, 0xC3]]
    assert forward.calls[:3] == want, "ids go round: `forward` reads the prompt and every id chosen since"


def test_the_sequence_handed_in_is_the_one_that_grows(byte_tokenizer):
    token_ids, params = [1, 2], SamplingParams(temperature=0, max_tokens=3)
    output = GrowingOutput(byte_tokenizer, params, 2, CONFIG.max_positions, CONFIG.eos_token_ids)
    for _ in _decode(Scripted("abc"), token_ids, output, argmax):
        pass
    assert token_ids == [1, 2, 97, 98, 99], "`token_ids` itself grows, not a copy of it"


def test_a_step_names_its_token(byte_tokenizer):
    got = [step.token_id for step in steps_of(Scripted("abc"), byte_tokenizer, max_tokens=3)]
    assert got == [97, 98, 99], "a DecodeStep per token, with the id that was chosen"


@pytest.mark.parametrize(
    ("script", "settings"), [([97, 256], {}), ("abc", {"max_tokens": 3}), ("abc", {"stop": "bc"})]
)
def test_the_loop_ends_with_the_last_token(byte_tokenizer, script, settings):
    forward = Scripted(script)
    steps = steps_of(forward, byte_tokenizer, **settings)
    got = [step.token_id for step in steps]
    assert got == forward.script, "the loop goes on until there is a finish reason, and no further"
    assert len(forward.calls) == len(got), "after the last token `forward` is not asked again"


def test_a_step_shows_what_became_visible(byte_tokenizer):
    got = [step.text for step in steps_of(Scripted("aéb"), byte_tokenizer, max_tokens=4)]
    assert got == ["a", "", "é", "b"], "a DecodeStep's text is what was added to the visible text, no more"


def test_a_step_holds_back_what_may_become_a_stop_string(byte_tokenizer):
    got = [step.text for step in steps_of(Scripted("a!b!?"), byte_tokenizer, stop="!?")]
    assert got == ["a", "", "!b", "", ""], "a DecodeStep shows `visible` text only: half a stop string waits"


@pytest.mark.parametrize(
    ("script", "settings", "want"),
    [
        ([97, 256, 256, 256], {"min_tokens": 3}, [97, 120, 120, 256]),
        ([97, 98, 98], {"min_tokens": 2, "stop_token_ids": [98]}, [97, 120, 98]),
    ],
)
def test_a_banned_token_gives_way_to_the_next_best(byte_tokenizer, script, settings, want):
    got = [step.token_id for step in steps_of(Scripted(script), byte_tokenizer, **settings)]
    assert got == want, "a token that is banned now is not chosen: the next best is"


def test_bans_are_put_into_a_copy(byte_tokenizer):
    kept = torch.arange(258.0)  # a forward that gives out the same tensor each time
    steps = steps_of(lambda token_ids: kept, byte_tokenizer, min_tokens=2, max_tokens=2, stop_token_ids=[257])
    assert [step.token_id for step in steps] == [255, 255]
    assert torch.equal(kept, torch.arange(258.0)), "bans go into a copy: the tensor is `forward`'s own"


def test_a_step_carries_the_logits_of_its_choice(byte_tokenizer):
    steps = steps_of(Scripted([97, 256, 256]), byte_tokenizer, min_tokens=2)
    assert [step.token_id for step in steps] == [97, 120, 256]
    got = [int(step.logits.argmax()) for step in steps]
    assert got == [97, 120, 256], "a DecodeStep carries the logits the choice was made from, bans included"
    banned = float(steps[0].logits[256])
    assert banned == -torch.inf, (
        f"a banned token's logit is minus infinity, below any other, and not {banned}"
    )
    assert steps[-1].logits.isfinite().all(), "a ban holds for as long as `output` says, and no longer"


def test_steps_bring_their_time_and_the_last_one_a_finish_reason(byte_tokenizer):
    steps = steps_of(Scripted("aéb"), byte_tokenizer, max_tokens=4)
    assert [step.finish_reason for step in steps[-1:]] == ["length"]
    times = [step.time for step in steps]
    assert times == sorted(times)


def test_steps_are_made_one_at_a_time_and_may_be_abandoned(byte_tokenizer):
    forward = Scripted("abcdef")
    steps = decode_steps(forward, byte_tokenizer, CONFIG, [1], SamplingParams(temperature=0))
    assert forward.calls == []
    step = next(steps)
    assert (step.text, step.finish_reason, len(forward.calls)) == ("a", None, 1)
    steps.close()
    assert len(forward.calls) == 1


def test_streamed_text_joined_is_the_final_text(byte_tokenizer):
    for settings in ({"stop": "!?"}, {"stop": "!?", "include_stop_str_in_output": True}, {"max_tokens": 7}):
        params = SamplingParams(**{"temperature": 0, "max_tokens": None} | settings)
        steps = list(decode_steps(Scripted("hé! you!?more words"), byte_tokenizer, CONFIG, [1], params))
        assert "".join(step.text for step in steps) == steps[-1].output.text
        assert steps[-1].output.text.startswith("hé! ")


def test_choose_may_be_handed_in(byte_tokenizer):
    steps = decode_steps(
        Scripted("abc"), byte_tokenizer, CONFIG, [1], SamplingParams(max_tokens=3),
        choose=lambda logits: int(logits.topk(2).indices[1]),
    )  # fmt: skip
    got = [step.token_id for step in steps]
    assert got == [120, 120, 120], "the loop chooses by the `choose` that was handed in, here the second best"


def test_the_lowest_id_wins_among_equals():
    assert argmax(torch.tensor([0.0, 3.0, 1.0, 3.0])) == 1


def test_the_models_length_ends_the_output(byte_tokenizer):
    output = run(Scripted("a" * 50), byte_tokenizer, prompt=(1,) * 15, max_tokens=50).outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (5, "length")
    output = run(Scripted("a" * 50), byte_tokenizer, prompt=(1,) * 19).outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (1, "length")


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ("", "0 tokens; accepted are 1 to 19"),
        ([], "0 tokens; accepted are 1 to 19"),
        ([1] * 20, "20 tokens; accepted are 1 to 19"),
        ("a" * 21, "21 tokens; accepted are 1 to 19"),
        ([1, 258], "token id 258; accepted are 0 to 257"),
        ([-1], "token id -1; accepted are 0 to 257"),
        ([True], "token id True"),
        ([1.0], "token id 1.0"),
        (["a"], "token id 'a'"),
        ("a\ud800", "D800 at position 1"),
    ],
)
def test_a_prompt_that_cannot_be_run_is_refused_before_anything_is_computed(byte_tokenizer, prompt, named):
    forward = Scripted("abc")
    for call in (generate, decode_steps):
        with pytest.raises(ParameterError, match=named) as caught:
            call(forward, byte_tokenizer, CONFIG, prompt, SamplingParams(temperature=0))
        assert caught.value.field == "prompt"
    assert forward.calls == []


def test_a_field_of_a_later_part_is_refused_before_the_first_step(byte_tokenizer):
    with pytest.raises(ParameterError, match=r"temperature=0\.7 .*Part 5"):
        decode_steps(Scripted("abc"), byte_tokenizer, CONFIG, [1], SamplingParams(temperature=0.7))


def test_a_result_is_shown_in_a_line_that_does_not_grow_with_it(byte_tokenizer):
    long, short = (
        generate(Scripted("abcdefgh" * 2), byte_tokenizer, CONFIG, "hi", SamplingParams(max_tokens=length))
        for length in (16, 10)
    )
    assert repr(short) == (
        "RequestOutput(request_id='0', prompt='hi', prompt_token_ids=[104, 105], outputs=[CompletionOutput("
        "index=0, text='abcdefghab', token_ids=[97, 98, 99, 100, 101, 102, 103, 104, ...], "
        "finish_reason='length', stop_reason=None, cumulative_logprob=None, logprobs=None, "
        "text_offsets=None)], finished=True, prompt_logprobs=None, num_cached_tokens=None, error=None, "
        "lora_request=None)"
    )
    assert len(repr(long)) == len(repr(short)) + 6, "six letters of text, up to a hundred; no ids, no times"
    assert (long["text"], long["token_ids"]) == (long.outputs[0].text, long.outputs[0].token_ids)
    with pytest.raises(KeyError, match="'logprobs': 'text' and 'token_ids' are accepted"):
        long["logprobs"]
    assert long.outputs[0].finished()
    assert long.metrics is long.stats


def test_the_result_holds_prompt_output_and_times(byte_tokenizer):
    result = generate(
        Scripted("abc"), byte_tokenizer, CONFIG, "hi", SamplingParams(max_tokens=3), request_id="r7"
    )
    assert (result.request_id, result.prompt, result.prompt_token_ids) == ("r7", "hi", [104, 105])
    assert result.finished
    assert (len(result.outputs), result.outputs[0].index, result.outputs[0].finish_reason) == (1, 0, "length")
    stats = result.stats
    assert len(stats.token_times) == 3
    assert stats.arrival <= stats.token_times[0] <= stats.token_times[-1]
    first, last = stats.token_times[0], stats.token_times[-1]
    assert stats.time_to_first_token == first - stats.arrival
    assert stats.time_per_output_token == pytest.approx((last - first) / 2)
    assert stats.tokens_per_second == pytest.approx(3 / (last - stats.arrival))


def test_the_callers_token_ids_are_left_alone(byte_tokenizer):
    prompt = [1, 2]
    result = run(Scripted("abc"), byte_tokenizer, prompt=prompt, max_tokens=3)
    assert (prompt, result.prompt_token_ids) == ([1, 2], [1, 2])
    assert result.prompt is None


def test_top_candidates_have_the_softmaxs_probabilities_in_order():
    tokenizer = Tokenizer.from_pretrained("storyteller")
    logits = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 3
    candidates = top_candidates(logits, tokenizer, k=7)
    probabilities = logits.double().exp() / logits.double().exp().sum()
    best = sorted(range(4096), key=lambda id: -probabilities[id])[:7]
    assert [candidate.token_id for candidate in candidates] == best
    assert [c.probability for c in candidates] == pytest.approx(
        [probabilities[id].item() for id in best], rel=1e-5
    )
    assert [candidate.text for candidate in candidates] == [tokenizer.decode([id]) for id in best]


@pytest.mark.parametrize("settings", [{}, {"n_head": 1, "n_inner": 30}, {"activation_function": "relu"}])
@pytest.mark.parametrize("seed", [3, 5, 8])
def test_tokens_of_random_models_equal_hugging_faces(byte_tokenizer, tmp_path, settings, seed):
    theirs = reference.random_gpt2(seed, vocab_size=258, eos_token_id=256, **settings)
    model = load_model(reference.save(theirs, tmp_path))
    prompt = [1, 7, 42]
    expected = reference.generate(theirs, prompt, max_length=64)
    assert smallest_gap(theirs, prompt, expected) > 1e-3, "a near-tie: choose another seed"
    output = run(FullForward(model), byte_tokenizer, prompt, model.config).outputs[0]
    assert difference(output.token_ids, expected) == ""


@pytest.mark.parametrize("prompt", PROMPTS)
def test_tokens_of_the_trained_model_equal_hugging_faces(trained, prompt):
    model, tokenizer, theirs = trained
    ids = tokenizer.encode(prompt)
    output = run(FullForward(model), tokenizer, prompt, model.config, max_tokens=60).outputs[0]
    expected = reference.generate(theirs, ids, max_new_tokens=60)
    assert difference(output.token_ids, expected) == ""
    assert len(output.token_ids) > 20
    assert output.text == tokenizer.decode(output.token_ids, skip_special_tokens=True)


def test_a_story_ends_by_itself_where_hugging_faces_does(trained):
    model, tokenizer, theirs = trained
    prompt = tokenizer.encode(PROMPTS[0])
    output = run(FullForward(model), tokenizer, prompt, model.config).outputs[0]
    expected = reference.generate(theirs, prompt, max_length=model.config.max_positions)
    assert difference(output.token_ids, expected) == ""
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    assert output.token_ids[-1] in model.config.eos_token_ids
    assert len(output.token_ids) > 100


@pytest.mark.parametrize("min_tokens", [10, 40])
def test_min_tokens_equal_hugging_faces_min_new_tokens(trained, min_tokens):
    model, tokenizer, theirs = trained
    prompt = tokenizer.encode("The end. Tom was happy.")
    output = run(
        FullForward(model), tokenizer, prompt, model.config, min_tokens=min_tokens, max_tokens=60
    ).outputs[0]
    expected = reference.generate(theirs, prompt, min_new_tokens=min_tokens, max_new_tokens=60)
    assert difference(output.token_ids, expected) == ""
    assert len(output.token_ids) >= min_tokens


def test_a_field_that_was_changed_to_a_wrong_value_is_refused_by_name(byte_tokenizer):
    params = SamplingParams(max_tokens=1)
    params.truncate_prompt_tokens = "3"
    with pytest.raises(ParameterError) as refused:
        generate(Scripted("a"), byte_tokenizer, CONFIG, "hi", params)
    assert refused.value.field == "truncate_prompt_tokens"
