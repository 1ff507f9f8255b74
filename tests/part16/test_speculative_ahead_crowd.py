"""Steps ahead and steps with drafts by turns, everything at once: the tokens of one step at a time."""

import random

import pytest

from engine.requests.listeners import Listeners
from tests.part06.fakes import BlockCache, Recorder, assert_idle
from tests.part12.pages import TWO_LAYERS, WatchedCache
from tests.part13.aheads import MOST_STEPS, assert_told, mixed
from tests.part16.mixed_steps import POLICIES, Policy, kinds_of, mixing, speculation_of

CACHES = {
    "slots": lambda blocks: BlockCache(blocks, 8),
    "recompute": lambda blocks: WatchedCache(TWO_LAYERS, blocks, 8, preemption_mode="recompute"),
    "swap": lambda blocks: WatchedCache(TWO_LAYERS, blocks, 8, num_swap_blocks=40, preemption_mode="swap"),
}


SMALL, LARGE, LONGEST = 17, 90, 128


@pytest.mark.parametrize(
    ("how", "name", "blocks"),
    [
        ("lookup", "slots", SMALL),
        ("lookup", "recompute", LARGE),
        ("lookup", "swap", SMALL),
        ("model", "slots", LARGE),
        ("model", "recompute", SMALL),
        ("model", "swap", SMALL),
    ],
)
@pytest.mark.parametrize("policy", POLICIES)
def test_everybody_gets_the_tokens_of_one_step_at_a_time(policy, how, name, blocks):
    """Newcomers and aborts while steps are in flight, prompts in chunks, and in the small memory
    preemptions.
    """
    rng, recorder, cache = random.Random(blocks), Recorder(), CACHES[name](blocks)
    options = {"seats": 8, "budget": 32, "listeners": Listeners([recorder]), "max_model_len": LONGEST}
    engine = mixing(cache, Policy(POLICIES[policy]), how, **options)
    kinds, same = kinds_of(engine), "the same beginning "
    prompts = {str(i): same * (i % 3) + "abcdefgh"[i % 8] * rng.randint(1, 60) for i in range(28)}
    waiting, done, aborted = list(prompts), {}, set()
    for _ in range(MOST_STEPS):
        for request in waiting[: rng.choice([0, 2, 6])]:
            engine.add_request(request, prompts[request], mixed(int(request)))
            waiting.remove(request)
        if rng.random() < 0.03 and engine.abort_request(request := rng.choice(list(prompts))):
            aborted.add(request)
        done |= {output.request_id: output for output in engine.step() if output.finished}
        if not waiting and not engine.has_unfinished_requests():
            break
    assert set(done) | aborted == set(prompts)
    for request, output in done.items():
        assert_told(output, prompts[request], mixed(int(request)))
    preempted = sum(event == "preempt" for event, _ in recorder.heard)
    assert (preempted > 0) == (blocks == SMALL)
    tally = speculation_of(engine).tally
    assert (tally.accepted > 0) == (tally.accepted < tally.proposed) == (policy != "never")
    assert ("ahead" in kinds) == (policy != "always")
    assert ("drafts" in kinds) == (policy != "never")
    assert_idle(engine)
