"""Exact rejection sampling: by enumeration, and by drawing."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine.decoding.params import SamplingParams
from engine.decoding.sampling import NO_TOKEN, adjust, distribution, draw, sample
from engine.decoding.sampling_state import SamplingState
from engine.execution.runner import Logits
from engine.requests.batch import Batch, Draws, Rows
from engine.speculation.config import MAX_DRAFTS
from engine.speculation.draft_model import DRAFT_SEED
from engine.speculation.rejection_sampler import DraftProbs, RejectionSampler, confirmed_tokens, residual

V, MANY = 12, 4000
CRITICAL = 38.6  # of chi-squared with up to 13 degrees of freedom: passed by chance once in 5,000 times


def asker(params: SamplingParams, seed: int = 0, drafts=(), prompt=(1, 2), output=()) -> SimpleNamespace:
    state = SamplingState(params, list(prompt), list(output), seed)
    return SimpleNamespace(
        id=str(seed), params=params, sampling=state, draft_ids=list(drafts), num_prompt_tokens=len(prompt)
    )


def verified(logits: torch.Tensor, requests: list, proposals=None, draft_probs=None) -> list[list[int]]:
    """The tokens that stand for each of these, whose rows are k + 1 each."""
    counts = [len(request.draft_ids) + 1 for request in requests]
    starts = np.cumsum([0, *counts]).tolist()
    rows, positions, token_ids = [], [], []
    for request in requests:
        state = request.sampling
        token_ids += [0, *request.draft_ids]
        for i in range(len(request.draft_ids) + 1):
            rows.append(state.with_drafts(request.draft_ids[:i]).draw())
            positions.append(len(state.output_ids) + i)
    batch = Batch(
        tuple(request.id for request in requests), tuple(token_ids), tuple(range(starts[-1])), tuple(starts),
        tuple(counts), np.zeros((len(counts), 1)), np.zeros(starts[-1]), (),
        Rows(tuple(range(starts[-1])), tuple(counts)), Draws(tuple(rows), tuple(positions)),
        (-1,) * len(counts),
    )  # fmt: skip
    draft_probs = draft_probs or DraftProbs()
    for request in requests if proposals else ():
        for i, probs in enumerate(proposals[request.id]):
            draft_probs.put(request.id, len(request.sampling.output_ids) + i, probs)
    tokens = RejectionSampler(draft_probs)(Logits(logits), batch).tolist()
    return [
        confirmed_tokens(tokens[start : start + count], request.draft_ids)
        for start, count, request in zip(starts, counts, requests, strict=False)
    ]


def logits_of(seed: int, rows: int = 1) -> torch.Tensor:
    return 2 * torch.randn(rows, V, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("seed", range(5))
def test_what_is_accepted_and_what_is_left_over_make_the_target(seed):
    """Every proposal, accepted or not, weighed by its probability: no drawing."""
    p, q = logits_of(seed)[0].softmax(-1).double(), logits_of(seed + 100)[0].softmax(-1).double()
    accepted = torch.minimum(p, q)  # q · min(1, p / q)
    left = residual(p[None], q[None])[0]
    made = accepted + (1 - accepted.sum()) * left / left.sum()
    torch.testing.assert_close(made, p, msg="accepted and redrawn tokens must add up to the target")


def test_nothing_left_over_is_the_target_itself():
    p = logits_of(0).softmax(-1)
    assert torch.equal(residual(p, p), p), "where p is nowhere larger than q, p itself is drawn from"


def test_the_numbers_come_from_seeds_and_positions():
    """A step that failed is verified again, and ranks compute the same: both must come to the same tokens."""
    q, made = logits_of(8).softmax(-1), []
    requests = [asker(SamplingParams(temperature=1), seed, [seed % V]) for seed in range(200)]
    for seed in (1, 2):
        torch.manual_seed(seed)
        made.append(verified(logits_of(7, 2).repeat(200, 1), requests, {each.id: q for each in requests}))
    differ = sum(first != second for first, second in zip(*made, strict=True))
    assert differ == 0, "acceptance takes `uniform`, the draw the seed's noise, and none torch's generator"


@pytest.mark.parametrize(("draft", "accepted"), [(0, 1.0), (1, 0.5), (2, 1.0)], ids="ABC")
def test_three_tokens_as_in_the_article(draft, accepted):
    """p = 0.5, 0.3, 0.2 and q = 0.2, 0.6, 0.2: B is proposed twice too often, and A lacks what B has."""
    p, q = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.2, 0.6, 0.2]])
    requests = [asker(SamplingParams(temperature=1), seed, [draft]) for seed in range(400)]
    made = verified(p.log().repeat(800, 1), requests, {request.id: q for request in requests})
    stood = [len(tokens) > 1 for tokens in made]
    instead = {tokens[0] for tokens, right in zip(made, stood, strict=True) if not right}
    assert instead <= {0}, "after a rejection: what is left over, which is A alone"
    share = sum(stood) / len(made)
    assert abs(share - accepted) < 0.12, (
        f"{'ABC'[draft]} stands with min(1, p / q) = {accepted}, not {share:.2f}: accepted too often or too "
        "seldom, or drawn after it was rejected"
    )


def test_who_proposes_without_drawing_is_certain():
    """q = 0, 1, 0: B stands with p = 0.3, and what is left over has no B."""
    p = torch.tensor([[0.5, 0.3, 0.2]])
    requests = [asker(SamplingParams(temperature=1), seed, [1]) for seed in range(400)]
    made = verified(p.log().repeat(800, 1), requests)
    stood = [len(tokens) > 1 for tokens in made]
    assert abs(sum(stood) / 400 - 0.3) < 0.12, "a certain draft has q = 1: it stands with p"
    assert not any(tokens[0] == 1 for tokens, right in zip(made, stood, strict=True) if not right), (
        "a rejected draft is not drawn after all"
    )


KNOBS = {
    "plain": SamplingParams(temperature=1),
    "cold": SamplingParams(temperature=0.6),
    "top-k": SamplingParams(temperature=1.2, top_k=5),
    "top-p": SamplingParams(temperature=1, top_p=0.7),
    "min-p": SamplingParams(temperature=1.5, min_p=0.1),
    "penalties": SamplingParams(
        temperature=1, repetition_penalty=1.5, frequency_penalty=0.5, presence_penalty=0.5
    ),
    "bias": SamplingParams(temperature=1, logit_bias={3: 2.0, 4: -3.0}),
    "all": SamplingParams(
        temperature=1.1, top_k=9, top_p=0.9, min_p=0.01, repetition_penalty=1.2, presence_penalty=0.3,
        logit_bias={5: 1.0},
    ),
}  # fmt: skip


def chi_squared(found: list[int], p: torch.Tensor) -> float:
    """Of tokens against probabilities[V]; infinite for a token that cannot be."""
    counts, expected = np.bincount(found, minlength=V), p.double().numpy() * len(found)
    if counts[expected == 0].any():
        return float("inf")
    here = expected > 0
    return float(((counts - expected)[here] ** 2 / expected[here]).sum())


@pytest.mark.parametrize("knobs", KNOBS)
@pytest.mark.parametrize("certain", [False, True], ids=["drawn", "certain"])
def test_a_sampled_token_has_the_targets_distribution(knobs, certain):
    """With a draft of its own distribution, and with one that nobody drew."""
    params, target, other = KNOBS[knobs], logits_of(7, 2), logits_of(8)
    requests = [asker(params, seed, output=[6]) for seed in range(MANY)]
    states = [request.sampling for request in requests]
    q = distribution(other.expand(MANY, V), states, [1] * MANY)
    drafts = (
        [2] * MANY if certain else draw(q, [seed ^ DRAFT_SEED for seed in range(MANY)], [1] * MANY).tolist()
    )
    for request, draft in zip(requests, drafts, strict=True):
        request.draft_ids = [draft]
    proposals = {} if certain else {request.id: row[None] for request, row in zip(requests, q, strict=True)}
    made = verified(target.repeat(MANY, 1), requests, proposals)

    first = distribution(target[:1], [states[0]], [1])[0]
    assert chi_squared([tokens[0] for tokens in made], first) < CRITICAL, (
        f"first tokens: not the target's distribution, with the knobs {knobs!r}"
    )
    accepted = [tokens for tokens in made if len(tokens) > 1]
    if certain:  # behind the draft, the next token, as if it had been said
        after = SamplingState(params, [1, 2], [6, 2], 0)
        second = distribution(target[1:], [after], [2])[0]
        found = [tokens[1] for tokens in accepted]
        assert len(found) > 100
        assert chi_squared(found, second) < CRITICAL, "penalties count an accepted draft"


def test_a_draft_of_probability_0_never_stands(monkeypatch):
    monkeypatch.setattr("engine.speculation.rejection_sampler.uniform", lambda *_: 0.0)
    logits = torch.zeros(2, V)
    logits[:, 5] = 5.0
    assert verified(logits, [asker(SamplingParams(top_k=1), drafts=[3])]) == [[5]], (
        "u may be 0: a draft stands if u · q < p, and not if both are 0"
    )


def test_a_draft_of_the_targets_own_distribution_always_stands(monkeypatch):
    monkeypatch.setattr("engine.speculation.rejection_sampler.uniform", lambda *_: 1 - 2.0**-53)
    logits, params = logits_of(1, rows=2), SamplingParams()
    p = distribution(logits[:1], [SamplingState(params, [1, 2], [], 0)])[0]
    rare = int(p.argmin())
    request = asker(params, drafts=[rare])
    assert verified(logits, [request], {request.id: [p]})[0][0] == rare, (
        "where q is p, every draft stands: u is below 1, but rounded to single precision it would be 1"
    )


def test_greedy_takes_drafts_as_far_as_they_are_its_own_choice():
    logits = logits_of(3, 4)
    best = logits.argmax(-1).tolist()
    greedy = SamplingParams(temperature=0)
    all_right = verified(logits, [asker(greedy, drafts=best[:3])])
    assert all_right == [best], "all accepted: one token more"
    one_wrong = verified(logits, [asker(greedy, drafts=[best[0], (best[1] + 1) % V, best[2]])])
    assert one_wrong == [[best[0], best[1]]], "the target's own choice in place of a wrong draft"


def test_a_greedy_row_among_sampled_ones_is_greedy_all_the_same():
    logits = logits_of(3, 4)
    best = logits.argmax(-1).tolist()
    requests = [asker(SamplingParams(temperature=0), 1, [best[0]]), asker(KNOBS["plain"], 2, [4])]
    assert verified(logits, requests)[0] == best[:2]


def test_a_stop_token_may_come_as_soon_as_there_are_enough_drafts_included():
    logits = torch.zeros(2, V)
    logits[0, 4] = logits[1, 7] = 5.0
    logits[1, 3] = 1.0
    for least, second in ((1, 7), (2, 3)):
        request = asker(SamplingParams(temperature=0, min_tokens=least), drafts=[4])
        request.sampling.stop_ids = [7]
        assert verified(logits, [request]) == [[4, second]], f"a stop token as token 2, {least} at least"


@pytest.mark.parametrize("temperature", [0, 1])
def test_numbers_that_are_broken_give_no_token(temperature):
    whole = slice(None)
    for broken, places in ((torch.nan, whole), (torch.nan, 5), (torch.inf, 5), (-torch.inf, whole)):
        logits = logits_of(3, 2)
        logits[0, places] = broken
        (tokens,) = verified(logits, [asker(SamplingParams(temperature=temperature), drafts=[1])])
        assert tokens == [NO_TOKEN], f"no finite number, no token, and none behind it: {broken} in {places}"


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_token_that_cannot_be_leaves_the_others(temperature):
    """A model may give −∞ for a token that it never says."""
    logits = logits_of(3, 2)
    logits[:, 4] = -torch.inf
    for seed in range(20):
        (tokens,) = verified(logits, [asker(SamplingParams(temperature=temperature), seed, drafts=[4])])
        assert len(tokens) == 1, "a draft that cannot be does not stand"
        assert tokens[0] not in (4, NO_TOKEN), "the largest number is finite, so there is a token"


def test_where_every_token_is_forbidden_there_is_none():
    request = asker(SamplingParams(temperature=1, min_tokens=3), drafts=[4])
    request.sampling.stop_ids = list(range(V))
    assert verified(logits_of(3, 2), [request]) == [[NO_TOKEN]], "all forbidden: no token, the draft neither"


def test_without_drafts_it_is_the_plain_sampler():
    requests = [asker(KNOBS["all"], seed) for seed in range(50)]
    logits = logits_of(9, 50)
    plain = sample(logits, [request.sampling for request in requests]).tolist()
    assert [tokens[0] for tokens in verified(logits, requests)] == plain


@pytest.mark.parametrize("certain", [False, True], ids=["drawn", "certain"])
def test_a_seed_that_is_named_gives_the_plain_samplers_tokens(certain):
    """So its text is the same every time, with however many drafts, whatever they are."""
    logits, q, stood = logits_of(7, 2), logits_of(8).softmax(-1), 0
    for seed in range(60):
        params = SamplingParams(temperature=1, presence_penalty=0.5, seed=seed)
        request = asker(params, seed, [seed % 3])
        (tokens,) = verified(logits, [request], {} if certain else {request.id: q})
        first = sample(logits[:1], [request.sampling], [0]).item()
        second = sample(logits[1:], [request.sampling.with_drafts([first])], [1]).item()
        stands = first == seed % 3
        assert tokens == ([first, second] if stands else [first]), "as without drafts"
        stood += stands
    assert 0 < stood < 60


def test_guesses_count_as_if_they_had_been_said_and_are_forgotten():
    params = SamplingParams(repetition_penalty=1.2, frequency_penalty=0.5, presence_penalty=0.3)
    said, guesses, logits = [6, 6, 2], [6, 9], logits_of(1)
    state = SamplingState(params, [1], said, 0)
    for output, behind in ((said + guesses, state.with_drafts(guesses)), (said, state)):
        fresh = SamplingState(params, [1], output, 0)
        assert torch.equal(adjust(logits, [behind]), adjust(logits, [fresh])), f"as after {output}"


def test_behind_the_first_that_is_not_its_draft_there_is_nothing():
    assert confirmed_tokens([5, 6, 7], [5, 6]) == [5, 6, 7], "all stood: one token more"
    assert confirmed_tokens([5, 6, 7], [5, 9]) == [5, 6], "the token in place of the draft is the last"
    assert confirmed_tokens([4, 6, 7], [5, 6]) == [4]
    assert confirmed_tokens([4], []) == [4]


def test_what_a_draft_was_drawn_from_is_kept_until_something_newer_is_there():
    draft_probs, p = DraftProbs(), [torch.full((1,), i) for i in range(5)]
    for position in (3, 4, 5):
        draft_probs.put("a", position, p[0])
    draft_probs.put("a", 4, p[1])
    assert draft_probs.get("a", 3) is p[0]
    assert draft_probs.get("a", 4) is p[1]
    assert draft_probs.get("a", 5) is None, "behind the newest lies what was proposed before it"
    assert draft_probs.get("b", 4) is None, "certain: nobody drew it"


@pytest.mark.parametrize("num_drafts", [0, 2], ids=["a plain step", "a step with drafts"])
def test_nothing_is_kept_of_sequences_that_are_not_in_the_step(num_drafts):
    """A step that fails is verified again, so what its own drafts were drawn from stays."""
    request = asker(SamplingParams(temperature=1.0), 5, drafts=[3, 4][:num_drafts])
    draft_probs, p = DraftProbs(), torch.full((V,), 1 / V)
    for name in (request.id, "another"):
        draft_probs.put(name, 0, p)
    verified(logits_of(0, num_drafts + 1), [request], draft_probs=draft_probs)
    assert draft_probs.get("another", 0) is None, "another was not in the step: its drafts are not verified"
    assert draft_probs.get(request.id, 0) is p


def test_what_a_draft_was_drawn_from_is_kept_as_long_as_it_may_be_verified():
    drawn_from, probs = torch.ones(2) / 2, DraftProbs()
    probs.put("a", 0, drawn_from)
    probs.put("a", MAX_DRAFTS - 1, drawn_from)
    assert probs.get("a", 0) is drawn_from, "the first of as many drafts as there may be"
    probs.put("a", MAX_DRAFTS, drawn_from)
    assert probs.get("a", 0) is None, "of an older proposal"


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_banned_logit_need_not_be_finite(temperature):
    """The model's own numbers may overflow for a token that is banned: a stop token before min_tokens."""
    logits = logits_of(3, 2)
    logits[:, 4] = torch.inf
    request = asker(SamplingParams(temperature=temperature, min_tokens=3), drafts=[4])
    request.sampling.stop_ids = [4]
    (tokens,) = verified(logits, [request])
    assert len(tokens) == 1, "a banned draft is not accepted"
    assert tokens[0] not in (4, NO_TOKEN), "the adjusted logits decide"
