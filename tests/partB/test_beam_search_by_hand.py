"""Beam search, small enough to check by hand: what goes on, which answers are kept, and when it ends."""

import math
from dataclasses import replace

import pytest
import torch

from engine.cache.paged import PagedCache
from engine.core.llm_engine import LLMEngine
from engine.decoding.beam_search import (
    BeamSearchParams,
    BestAnswers,
    Continuation,
    best_continuations,
    num_candidates,
    penalized,
)
from engine.decoding.logprobs import SUPPORTS
from engine.decoding.params import ParameterError, SamplingParams
from engine.execution.runner import Logits, ModelRunner
from engine.execution.scores import ChosenLogprobs
from engine.scheduling.continuous import ContinuousScheduler
from tests.part06.fakes import CONFIG, TOKENIZER, assert_idle, run_to_end
from tests.partB.searching import search

END = 4
# After each of five tokens, the probabilities of the next: the likeliest first step leads to a poor second.
NEXT = torch.tensor([
    [0.01, 0.60, 0.37, 0.01, 0.01],
    [0.22, 0.20, 0.20, 0.28, 0.10],
    [0.01, 0.01, 0.02, 0.95, 0.01],
    [0.10, 0.10, 0.10, 0.10, 0.60],
    [0.20, 0.20, 0.20, 0.20, 0.20],
])  # fmt: skip


class LastToken:
    """A runner's way: the next token depends on the last alone."""

    def fits(self, batch) -> bool:
        return True

    def __call__(self, batch) -> Logits:
        last = torch.tensor([batch.token_ids[row] for row in batch.rows.chosen])
        return Logits(NEXT[last].log())


class NoMemory:
    """Has nothing to copy: the way remembers nothing."""

    def apply(self, copies) -> None:
        pass


@pytest.fixture
def engine():
    config = replace(CONFIG, vocab_size=5, eos_token_ids=(END,), max_positions=32)
    runner = ModelRunner([LastToken()], NoMemory(), scores=[ChosenLogprobs(TOKENIZER)])
    scheduler = ContinuousScheduler(PagedCache(32, 4), 8, 16)
    engine = LLMEngine(TOKENIZER, config, scheduler, runner, supports=SUPPORTS)
    yield engine
    assert_idle(engine)


def never(token_id: int) -> bool:
    return False


def is_end(token_id: int) -> bool:
    return token_id == END


def tokens(continuations) -> list[tuple[int, int]]:
    return [(each.beam, each.token_id) for each in continuations]


def test_the_best_continuations_of_one_beam_are_its_likeliest_tokens():
    going_on, ended = best_continuations([0.0], [[(3, -0.5), (1, -1.5), (2, -2.5)]], 2, never)
    assert tokens(going_on) == [(0, 3), (0, 1)], (
        "the best of them go on, the best first: one beam may have several"
    )
    assert ended == [], "nothing has ended"


def test_a_score_is_the_beams_and_the_tokens_together():
    going_on, _ = best_continuations([-1.0, -3.0], [[(1, -2.0)], [(2, -0.25)]], 2, never)
    assert going_on == [Continuation(0, 1, -3.0), Continuation(1, 2, -3.25)], (
        "a score is the sum of the beam's score and the token's log probability: neither alone, and no mean"
    )


def test_all_continuations_are_ranked_together():
    likeliest = [[(1, -0.1), (2, -0.2), (3, -0.3)], [(1, -0.1), (2, -0.2), (3, -0.3)]]
    going_on, _ = best_continuations([0.0, -5.0], likeliest, 3, never)
    assert tokens(going_on) == [(0, 1), (0, 2), (0, 3)], (
        "the continuations of all beams are ranked together: a beam may have several, or none"
    )


def test_what_has_ended_does_not_go_on():
    going_on, _ = best_continuations([0.0], [[(END, -0.1), (1, -0.2)]], 2, is_end)
    assert tokens(going_on) == [(0, 1)], "an ended continuation does not go on"


def test_an_end_starves_no_beam():
    likeliest = [[(END, -0.1), (1, -0.2), (2, -0.3)], [(END, -0.15), (3, -0.4), (1, -9.0)]]
    going_on, ended = best_continuations([0.0, 0.0], likeliest, 2, is_end)
    assert tokens(ended) == [(0, END), (1, END)], "each beam may end: two answers may end in one token"
    assert tokens(going_on) == [(0, 1), (0, 2)], (
        "as many go on as the width says, however many have ended: the next ones take their place"
    )


def test_an_end_counts_only_among_the_best():
    likeliest = [[(1, -0.1), (2, -0.2), (END, -0.3), (3, -0.4)]]
    going_on, ended = best_continuations([0.0], likeliest, 2, is_end)
    assert ended == [], "an end that is not among the best `width` of all continuations is no answer"
    assert tokens(going_on) == [(0, 1), (0, 2)]


def test_equal_scores_keep_their_order():
    going_on, _ = best_continuations([-1.0, -1.0], [[(3, -1.0), (1, -1.0)], [(2, -1.0)]], 3, never)
    assert tokens(going_on) == [(0, 3), (0, 1), (1, 2)], (
        "of equal scores, the earlier beam comes first, and then the token that stands earlier"
    )


@pytest.mark.parametrize(
    ("likeliest", "width", "answers", "rule"),
    [
        (
            [[(END, -0.1), (1, -0.2), (END + 1, -0.3), (2, -0.4)]], 2, [(0, END)],
            "its place among all counts, not how many beams stand before it: the third of two is no answer",
        ),
        (
            [[(1, -0.1), (END, -0.1)]], 1, [],
            "the best `width` of all are so many, and no more: of equal scores the later one is not one",
        ),
        (
            [[(1, -0.1), (2, -0.2)], [(END, -0.9), (3, -1.0)]], 2, [],
            "all beams are ranked together: the best token of a poor beam is no answer",
        ),
        (
            [[(END, -0.2), (1, -0.9)], [(END, -0.1), (1, -0.9)]], 2, [(1, END), (0, END)],
            "those that have ended, too, stand with the best first",
        ),
    ],
)  # fmt: skip
def test_an_end_has_its_rank_among_all_continuations(likeliest, width, answers, rule):
    _, ended = best_continuations([0.0] * len(likeliest), likeliest, width, lambda token_id: token_id >= END)
    assert tokens(ended) == answers, rule


def test_the_beams_and_their_tokens_are_not_changed():
    scores, likeliest = [-1.0, -0.5], [[(1, -1.0)], [(2, -1.0), (3, -2.0)]]
    best_continuations(scores, likeliest, 1, never)
    assert scores == [-1.0, -0.5], "the scores handed in stay as they are"
    assert likeliest == [[(1, -1.0)], [(2, -1.0), (3, -2.0)]], "the tokens handed in stay as they are"


def test_each_beam_offers_enough_tokens_that_the_width_can_go_on():
    """Were all ends among them, as many would still go on."""
    assert num_candidates(3, 1) == 6
    assert num_candidates(3, 2) == 9
    assert num_candidates(3, 0) == 6  # as in Hugging Face


def test_a_length_penalty_divides_the_score_by_the_length_to_its_power():
    assert penalized(-6.0, 3, 1.0) == -2.0
    assert penalized(-6.0, 3, 0.0) == -6.0
    assert penalized(-6.0, 2, 2.0) == -1.5
    assert penalized(-6.0, 2, -1.0) == -12.0


def test_the_best_answers_are_kept_by_their_penalized_score():
    answers = BestAnswers[str](2, 1.0)
    answers.add(-2.0, 1, "short")
    answers.add(-3.0, 3, "long")
    answers.add(-9.0, 3, "poor")
    assert [answer for _, answer in answers.kept] == ["long", "short"]
    answers.add(-4.0, 2, "equal to short")
    assert [answer for _, answer in answers.kept] == ["long", "short"], "an equal one displaces no other"


def test_the_search_may_end_when_no_beam_could_displace_an_answer():
    answers = BestAnswers[str](2, 1.0)
    answers.add(-1.0, 1, "a")
    assert answers.may_improve(-100.0, 1), "there is a place left"
    answers.add(-4.0, 2, "b")
    assert answers.may_improve(-5.9, 3), "-5.9 / 3 is better than -2"
    assert not answers.may_improve(-6.0, 3), "-6 / 3 is no better than -2"


def test_two_beams_find_what_greedy_search_misses(engine):
    """0.60 · 0.28 for the greedy way, 0.37 · 0.95 for the other."""
    engine.add_request("greedy", [0], SamplingParams(temperature=0, max_tokens=2))
    assert run_to_end(engine)["greedy"].outputs[0].token_ids == [1, 3]
    ((alone,),) = search(engine, [[0]], BeamSearchParams(1, 2))
    assert alone.tokens == [0, 1, 3], "one beam is greedy search"
    ((best, second),) = search(engine, [[0]], BeamSearchParams(2, 2))
    assert best.tokens == [0, 2, 3], "the second best first token leads to the better answer"
    assert best.cum_logprob == pytest.approx(math.log(0.37 * 0.95))
    assert best.score == pytest.approx(math.log(0.37 * 0.95) / 2)
    assert second.tokens == [0, 1, 3]
    assert (best.finish_reason, best.stop_reason) == ("length", None)


def test_an_answer_ends_with_the_end_token_and_counts_it(engine):
    """0.37 · 0.95 · 0.60 over three tokens."""
    ((best, _),) = search(engine, [[0]], BeamSearchParams(2, 8))
    assert best.tokens == [0, 2, 3, END]
    assert best.score == pytest.approx(math.log(0.37 * 0.95 * 0.60) / 3)
    assert (best.finish_reason, best.stop_reason) == ("stop", END)
    chosen = [scores[token].logprob for scores, token in zip(best.logprobs, best.tokens[1:], strict=True)]
    assert [round(math.exp(logprob), 2) for logprob in chosen] == [0.37, 0.95, 0.60]
    ((going_on, _),) = search(engine, [[0]], BeamSearchParams(2, 8, ignore_eos=True))
    assert len(going_on.tokens) == 9, "with ignore_eos every answer has its full length"


def test_a_penalty_decides_between_short_and_long(engine):
    """After token 3, the end comes at once with 0.60; another way round costs at least 0.10 · 0.37 …"""
    ((short, *_),) = search(engine, [[3]], BeamSearchParams(3, 6, length_penalty=0.0))
    assert short.tokens == [3, END]
    ((long, *_),) = search(engine, [[3]], BeamSearchParams(3, 6, length_penalty=6.0))
    assert len(long.tokens) > len(short.tokens), "a high length penalty prefers longer answers"


def test_there_are_no_more_answers_than_ways(engine):
    """Of five tokens, one step has five continuations."""
    (found,) = search(engine, [[0]], BeamSearchParams(8, 1))
    assert len(found) == 5
    assert len({tuple(sequence.tokens) for sequence in found}) == 5


def test_the_end_tokens_text_is_shown_if_asked_for(engine):
    ((hidden, _),) = search(engine, [[0]], BeamSearchParams(2, 8))
    ((shown, _),) = search(engine, [[0]], BeamSearchParams(2, 8, include_stop_str_in_output=True))
    assert hidden.tokens == shown.tokens, "the tokens are the same"
    assert (hidden.text, shown.text) == ("\0\2\3", "\0\2\3\4")


@pytest.mark.parametrize(("name", "value", "accepted"), [
    ("beam_width", 0, "a whole number of at least 1"),
    ("beam_width", True, "a whole number of at least 1"),
    ("max_tokens", 1.5, "a whole number of at least 1"),
    ("max_tokens", None, "a whole number of at least 1"),
    ("ignore_eos", 1, "true or false"),
    ("include_stop_str_in_output", None, "true or false"),
    ("temperature", 0.7, "draws nothing.* 0 and 1 are accepted"),
    ("temperature", None, "0 and 1 are accepted"),
    ("length_penalty", float("nan"), "a number from -10.0 to 10.0"),
    ("length_penalty", 11, "a number from -10.0 to 10.0"),
    ("length_penalty", "1", "a number from -10.0 to 10.0"),
    ("structured_outputs", {"choice": ["a"]}, "knows no grammar"),
])  # fmt: skip
def test_a_wrong_value_is_refused_by_name(name, value, accepted):
    with pytest.raises(ParameterError, match=f"{name}=.*{accepted}") as refused:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 3} | {name: value})
    assert refused.value.field == name


def test_an_unknown_field_is_refused_with_those_that_exist():
    with pytest.raises(TypeError, match=r"no field 'early_stopping'.*length_penalty"):
        BeamSearchParams(2, 3, early_stopping=True)
