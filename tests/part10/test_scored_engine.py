"""Log probabilities through the engine: what the fake model says, whoever else is in the step."""

import math
from dataclasses import replace

import pytest
import torch

from engine.decoding import logprobs as scoring_functions
from engine.decoding.params import SamplingParams
from engine.execution.runner import HostCopy
from engine.requests.listeners import Listeners
from engine.requests.request import State
from tests.part06.fakes import TOKENIZER, BlockCache, Recorder, fake_logits, run_to_end, told_alone
from tests.part10.scored import ScoringFake, expected, finish, step, told

PROMPT = "The dog and the ball"
ASKED = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=3, prompt_logprobs=2)


def ask(engine, params=ASKED, prompt=PROMPT):
    engine.add_request("r", prompt, params)
    (output,) = finish(engine).values()
    return output


def assert_right(output, params) -> None:
    """Every number of this output is the fake model's."""
    told_ids = output.prompt_token_ids
    for sample in output.outputs:
        assert len(sample.logprobs) == len(sample.text_offsets) == len(sample.token_ids)
        right = expected([*told_ids, *sample.token_ids], len(told_ids))
        assert told(sample.logprobs, sample.token_ids) == pytest.approx(right, abs=1e-5)
        assert sample.cumulative_logprob == pytest.approx(sum(right), abs=1e-4)
        for i, scores in enumerate(sample.logprobs):
            logits = fake_logits([*told_ids, *sample.token_ids[:i]])
            top = logits.topk(params.logprobs).indices.tolist()
            assert list(scores) == list(dict.fromkeys([sample.token_ids[i], *top]))
            rank = 1 + int((logits > logits[sample.token_ids[i]]).sum())
            assert scores[sample.token_ids[i]].rank == rank
    assert output.prompt_logprobs[0] is None, "nothing comes before the first token of a prompt"
    assert len(output.prompt_logprobs) == len(told_ids)
    right = expected(told_ids, 1)
    assert told(output.prompt_logprobs[1:], told_ids[1:]) == pytest.approx(right, abs=1e-5)


def test_prompt_and_output_are_scored(scoring_engine):
    assert_right(ask(scoring_engine()), ASKED)


def test_the_tokens_are_those_of_an_engine_that_is_not_asked(scoring_engine):
    assert ask(scoring_engine()).outputs[0].token_ids == told_alone(PROMPT, ASKED_QUIET).token_ids


ASKED_QUIET = replace(ASKED, logprobs=None, prompt_logprobs=None)


@pytest.mark.parametrize(("n", "m"), [(0, 0), (1, 20), (20, 1), (None, 3), (4, None)])
def test_each_number_asked_for_is_given_and_what_is_not_asked_for_is_not(scoring_engine, n, m):
    output = ask(scoring_engine(), replace(ASKED, logprobs=n, prompt_logprobs=m))
    (sample,) = output.outputs
    if n is None:
        assert (sample.logprobs, sample.cumulative_logprob, sample.text_offsets) == (None, None, None)
    else:
        # Greedy takes the likeliest, so it is one of the n, unless n is 0.
        assert [len(scores) for scores in sample.logprobs] == [max(n, 1)] * 9
        assert [len(scores.top(20)) for scores in sample.logprobs] == [n] * 9
    if m is None:
        assert output.prompt_logprobs is None
    else:
        assert [len(scores.top(20)) for scores in output.prompt_logprobs[1:]] == [m] * (len(PROMPT) - 1)


@pytest.mark.parametrize(
    "knobs",
    [
        {"temperature": 1.8, "seed": 4},
        {"temperature": 0, "logit_bias": {65: 100}},
        {"temperature": 0.7, "seed": 4, "top_k": 2, "repetition_penalty": 3, "frequency_penalty": 2},
        {"temperature": 0, "min_tokens": 9, "ignore_eos": False},
    ],
    ids=lambda knobs: ", ".join(knobs),
)
def test_scores_are_of_the_raw_logits_whatever_sampling_makes_of_them(scoring_engine, knobs):
    """With a bias of 100 the token 65 is certain; the model itself thinks little of it."""
    params = replace(ASKED, **knobs)
    output = ask(scoring_engine(), params)
    assert_right(output, params)
    assert (
        output.outputs[0].token_ids
        == told_alone(PROMPT, replace(params, logprobs=None, prompt_logprobs=None)).token_ids
    )


def test_a_token_begins_where_it_does_whether_or_not_its_text_is_held_back(scoring_engine):
    """A stop string that may have begun keeps the text from being shown, not from being there."""
    (plain,) = ask(scoring_engine()).outputs
    for i in range(1, 9):
        stop = plain.text[plain.text_offsets[i] - 1 : plain.text_offsets[i]] + "never"
        (sample,) = ask(scoring_engine(), replace(ASKED, stop=(stop,))).outputs
        assert sample.text_offsets == plain.text_offsets


@pytest.mark.parametrize("budget", [1, 2, 3, 7, 19, 20, 21])
def test_a_prompt_in_chunks_has_the_scores_of_a_prompt_in_one(scoring_engine, budget):
    output = ask(scoring_engine(seats=1, budget=budget))
    assert_right(output, ASKED)


def test_a_prompt_of_one_token(scoring_engine):
    output = ask(scoring_engine(), prompt="x")
    assert output.prompt_logprobs == [None]
    assert_right(output, ASKED)


def test_n_samples_have_their_own_scores_and_share_the_prompts(scoring_engine):
    params = replace(ASKED, n=3, temperature=1.0, seed=8)
    output = ask(scoring_engine(), params)
    assert_right(output, params)
    assert len({tuple(sample.token_ids) for sample in output.outputs}) == 3


def test_the_prompt_of_n_samples_is_scored_once(scoring_engine):
    cache = BlockCache(64, 8)
    forward = ScoringFake(cache)
    engine = scoring_engine(forward=forward)
    ask(engine, replace(ASKED, n=3, temperature=1.0, seed=8))
    assert sum(forward.at_once) == len(PROMPT) - 1, "each prompt row once"


def test_prompt_log_probabilities_appear_when_the_whole_prompt_was_read(scoring_engine):
    engine = scoring_engine(seats=1, budget=6)
    engine.add_request("r", PROMPT, ASKED)
    seen = [step(engine)[0].prompt_logprobs for _ in range(4)]
    assert [found and len(found) for found in seen] == [None, None, None, 20]
    finish(engine)


CROWD = {
    "quiet": ("Once upon a time", ASKED_QUIET),
    "scored": (PROMPT, ASKED),
    "outputs": ("In a big house", replace(ASKED, prompt_logprobs=None, logprobs=20)),
    "prompt": ("A red ball fell down the well", replace(ASKED, logprobs=None, prompt_logprobs=5)),
    "sampled": ("Max ran", replace(ASKED, temperature=0.9, seed=3, n=2, logprobs=0)),
    "ends": ("Tom", replace(ASKED, ignore_eos=False, max_tokens=40, stop=("e", "qu"), min_tokens=3)),
}


def scores_of(outputs) -> dict:
    """All that was said of each request, made comparable."""
    return {
        name: (
            output.prompt_logprobs,
            [(list(s.token_ids), s.logprobs, s.cumulative_logprob, s.text_offsets) for s in output.outputs],
        )
        for name, output in outputs.items()
    }


@pytest.fixture
def in_peace(scoring_engine):
    """What each of the crowd is told when it is alone."""
    found = {}
    for name, (prompt, params) in CROWD.items():
        engine = scoring_engine()
        engine.add_request(name, prompt, params)
        found |= finish(engine)
    return scores_of(found)


@pytest.mark.parametrize("budget", [8, 13, 64])
def test_batch_mates_and_the_order_of_arrival_change_nothing(scoring_engine, in_peace, budget):
    for names in (list(CROWD), list(reversed(CROWD))):
        engine = scoring_engine(seats=6, budget=budget)
        for name in names:
            engine.add_request(name, *CROWD[name])
        assert scores_of(finish(engine)) == in_peace


@pytest.mark.parametrize("budget", [8, 30])
def test_preemption_changes_nothing_and_reports_nothing_twice(scoring_engine, in_peace, budget):
    recorder = Recorder()
    engine = scoring_engine(seats=7, budget=budget, blocks=25, listeners=Listeners([recorder]))
    for name in ("scored", "prompt", "sampled", "outputs", "quiet", "ends"):
        engine.add_request(name, *CROWD[name])
    engine.scheduler.cache.num_blocks = 9  # from now on there is too little
    assert scores_of(finish(engine)) == in_peace
    preempted = {name.partition("/")[0] for kind, name in recorder.heard if kind == "preempt"}
    assert preempted & {"scored", "prompt", "sampled"}, "nobody who scores a prompt was preempted"


def test_what_was_told_of_a_prompt_stays_told_while_it_is_computed_again(scoring_engine):
    engine = scoring_engine(seats=1, budget=8)
    engine.add_request("r", PROMPT, ASKED)
    while not (output := step(engine)[0]).outputs[0].token_ids:
        pass
    (request,) = engine.scheduler.running
    engine.scheduler._preempt(request)
    assert request.prompt_logprobs == []
    (again,) = step(engine)
    assert again.prompt_logprobs == output.prompt_logprobs
    (done,) = finish(engine).values()
    assert_right(done, ASKED)


def test_a_step_that_is_still_under_way_when_its_request_is_preempted_adds_no_prompt_scores(scoring_engine):
    """As when the next step is launched before the last one lands (Part 13)."""
    engine = scoring_engine(seats=1, budget=8)
    engine.add_request("r", PROMPT, ASKED)
    step(engine)
    flying = engine.launch()
    (request,) = engine.scheduler.running
    engine.scheduler._preempt(request)
    assert request.state is State.WAITING
    engine.land(flying)
    (output,) = finish(engine).values()
    assert_right(output, ASKED)


def test_a_failed_step_that_is_computed_again_reports_nothing_twice(scoring_engine):
    forward = ScoringFake(BlockCache(64, 8))
    forward.fail_at = {2: ConnectionError("the cable came loose"), 5: ConnectionError("again")}

    def recover(step, error):
        return [] if isinstance(error, ConnectionError) else list(step.requests)

    assert_right(ask(scoring_engine(seats=1, budget=8, forward=forward, recover=recover)), ASKED)


def test_a_stop_string_cuts_text_and_no_scores(scoring_engine):
    text = told_alone(PROMPT, replace(ASKED_QUIET, max_tokens=60)).text
    stop = next(text[i : i + 2] for i in range(20, 60) if text[i : i + 2].isascii())
    params = replace(ASKED, max_tokens=60, stop=(stop,))
    output = ask(scoring_engine(), params)
    (sample,) = output.outputs
    assert sample.stop_reason == stop
    assert_right(output, params)
    assert sample.text_offsets[-1] >= len(sample.text) - 1


def test_the_token_that_ends_an_output_is_scored_too(scoring_engine):
    params = replace(ASKED, ignore_eos=False, max_tokens=150)
    output = ask(scoring_engine(), params, prompt="b")
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].token_ids[-1] == 256
    assert_right(output, params)


def test_text_offsets_say_where_each_token_begins(scoring_engine):
    """The fake model's tokens are bytes: many are a part of a character, or none."""
    (sample,) = ask(scoring_engine(), replace(ASKED, max_tokens=80)).outputs
    for i, offset in enumerate(sample.text_offsets):
        before = bytes(id for id in sample.token_ids[:i] if id < 256)  # the end of sequence is no text
        complete = len(before.decode(errors="replace"))
        assert complete - 1 <= offset <= complete
    assert list(sample.text_offsets) == sorted(sample.text_offsets)
    assert sample.text_offsets[0] == 0


def test_who_asks_for_none_pays_for_none(scoring_engine, monkeypatch):
    def never(*_, **__):
        raise AssertionError("log probabilities were computed, and nobody had asked")

    monkeypatch.setattr(scoring_functions, "score", never)
    monkeypatch.setattr(torch, "log_softmax", never)
    engine = scoring_engine()
    plain = ask(engine, ASKED_QUIET)
    assert plain.outputs[0].token_ids == told_alone(PROMPT, ASKED_QUIET).token_ids
    assert plain.outputs[0].logprobs is plain.prompt_logprobs is None


def test_rows_of_who_does_not_ask_are_not_scored(scoring_engine, monkeypatch):
    rows, score = [], scoring_functions.score

    def counting(logits, token_ids, n):
        rows.append(len(logits))
        return score(logits, token_ids, n)

    monkeypatch.setattr(scoring_functions, "score", counting)
    engine = scoring_engine()
    for name in "abc":
        engine.add_request(name, PROMPT, ASKED_QUIET)
    engine.add_request("d", PROMPT, replace(ASKED, prompt_logprobs=None))
    finish(engine)
    assert rows == [1] * 9


def test_a_prompts_logits_are_never_there_all_at_once(scoring_engine, monkeypatch):
    monkeypatch.setattr(scoring_functions, "CHUNK_LOGITS", 5 * 257)
    forward = ScoringFake(BlockCache(64, 8))
    output = ask(scoring_engine(forward=forward), prompt=PROMPT * 3)
    assert_right(output, ASKED)
    assert max(forward.at_once) == 5, "the output layer gets a chunk of a prompt's rows at a time"


def test_nothing_is_read_from_the_device_before_the_result_and_then_everything_at_once(
    scoring_engine, monkeypatch
):
    engine = scoring_engine()
    engine.add_request("a", PROMPT, ASKED)
    engine.add_request("b", PROMPT, replace(ASKED, logprobs=None))
    engine.add_request("c", PROMPT, ASKED_QUIET)

    def refused(*_, **__):
        raise AssertionError("the device was waited for")

    reads, read = [], HostCopy.read
    for _ in range(3):
        with monkeypatch.context() as patch:
            for name in ("tolist", "item", "cpu", "__bool__", "__int__", "__float__"):
                patch.setattr(torch.Tensor, name, refused)
            patch.setattr(HostCopy, "read", refused)
            flying = engine.launch()
            assert not flying.error, f"{type(flying.error).__name__}: {flying.error}"
            patch.setattr(HostCopy, "read", lambda home: reads.append(home) or read(home))
            engine.land(flying)
    assert len(reads) == 3
    finish(engine)


@pytest.mark.parametrize("where", ["prompt", "output"])
def test_logits_that_are_no_numbers_fail_their_request_and_no_other(scoring_engine, caplog, where):
    class Poisoned(ScoringFake):
        def __call__(self, batch):
            logits = super().__call__(batch)
            if where == "prompt" and sum(batch.rows.prompt_counts):
                logits.prompt_hidden[batch.rows.prompt_counts[0]] = float("nan")  # b's first
            for row, place in enumerate(zip(batch.ids, batch.draws.positions, strict=True)):
                if where == "output" and place == ("b/0", 2):
                    logits.values[row] = float("nan")
            return logits

    engine = scoring_engine(forward=Poisoned(BlockCache(64, 8)))
    for name in "abc":
        engine.add_request(name, PROMPT, ASKED)
    with caplog.at_level("CRITICAL"):
        done = run_to_end(engine)
    assert not done["a"].error, done["a"].error
    assert done["b"].error == "ArithmeticError: the model's logits are not finite numbers"
    assert_right(done["a"], ASKED)
    assert scores_of({"x": done["a"]}) == scores_of({"x": done["c"]})


def test_perplexity_of_a_prompt_is_that_of_its_tokens(scoring_engine):
    output = ask(scoring_engine())
    ids = output.prompt_token_ids
    found = scoring_functions.perplexity(told(output.prompt_logprobs[1:], ids[1:]))
    assert found == pytest.approx(math.exp(-sum(expected(ids, 1)) / (len(ids) - 1)))
    assert TOKENIZER.decode(ids) == PROMPT
