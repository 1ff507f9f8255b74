"""What requests pay for in a real engine: chunks, preemptions, prefix hits, samples, one step ahead."""

from functools import partial

import pytest

from engine.core.llm_engine import LLMEngine
from engine.decoding.params import SamplingParams
from engine.execution.runner import ModelRunner
from engine.scheduling.continuous import ContinuousScheduler
from engine.telemetry.bill import PAID_KINDS
from engine.telemetry.cost import Account, CostMeter
from tests.part06.fakes import CONFIG, TOKENIZER, BlockCache, FakeForward, assert_idle, run_to_end
from tests.part12.pages import PageReader, paged
from tests.part13.aheads import ahead
from tests.part19.metering import DOLLAR_A_SECOND, EVEN, Loud

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SEVERAL = partial(ContinuousScheduler, max_num_seqs=4, max_num_batched_tokens=16)


def accounts(meter: CostMeter) -> dict[str, Account]:
    """By request, filled as they are complete."""
    done: dict[str, Account] = {}
    meter.closed.append(lambda account: done.update({account.request_id: account}))
    return done


def used(account: Account) -> tuple[int, ...]:
    """Its tokens: cached, input, output."""
    return tuple(account.tokens[kind] for kind in PAID_KINDS)


def assert_all_is_given_out(meter: CostMeter, done: dict[str, Account]) -> None:
    """The accounts hold what the bill says that requests paid."""
    bill = meter.read()
    for kind in PAID_KINDS:
        assert sum(account.ns[kind] for account in done.values()) == bill.ns[kind], f"{kind} time"
        assert sum(account.tokens[kind] for account in done.values()) == bill.tokens[kind], f"{kind} tokens"
    assert bill.num_ended == len(done)


def test_a_prompt_in_chunks_and_its_answer_are_counted_once(metered):
    engine, meter = metered(SEVERAL)
    done = accounts(meter)
    engine.add_request("a", "x" * 40, GREEDY)
    run_to_end(engine)
    assert used(done["a"]) == (0, 40, 6), "40 prompt tokens in three chunks, six output tokens"
    assert done["a"].reason == "length"
    assert done["a"].ns["input"] > 0
    assert done["a"].ns["output"] > 0
    assert done["a"].ns["cached"] == 0
    assert_all_is_given_out(meter, done)


def test_an_output_has_its_account_when_it_is_finished(metered):
    """`usage` reads it there."""
    engine, meter = metered(SEVERAL)
    done = accounts(meter)
    engine.add_request("a", "prompt", GREEDY)
    output = run_to_end(engine)["a"]
    assert output.stats.account is done["a"]


def test_n_samples_are_one_account(metered):
    engine, meter = metered(SEVERAL)
    done = accounts(meter)
    engine.add_request("a", "prompt", SamplingParams(n=3, seed=1, max_tokens=4, ignore_eos=True))
    run_to_end(engine)
    assert used(done["a"]) == (0, 6, 12), "one prompt, however often it was read for the samples"
    assert_all_is_given_out(meter, done)


def test_tokens_found_in_the_cache_are_cached_tokens():
    """Two requests with one beginning, through Part 12's pages: the second pays little for it."""
    cache = paged(64)
    engine = pages_engine(cache)
    meter = CostMeter(DOLLAR_A_SECOND)
    engine.listeners.add(meter)
    done = accounts(meter)
    for name in "ab":
        engine.add_request(name, "the same beginning " + name, GREEDY)
        run_to_end(engine)
    assert used(done["a"]) == (0, 20, 6)
    assert used(done["b"]) == (16, 4, 6), "four blocks of four tokens were found, four tokens computed"
    assert done["a"].ns["cached"] == 0
    assert done["b"].ns["cached"] > 0, "to read what was found is not for nothing"
    assert_all_is_given_out(meter, done)


def pages_engine(cache, **options) -> LLMEngine:
    scheduler = ContinuousScheduler(cache, 4, 32)
    runner = ModelRunner([PageReader(cache)], cache.memory)
    return LLMEngine(TOKENIZER, CONFIG, scheduler, runner, Loud(), **options)


def test_preempted_requests_pay_no_token_twice(metered):
    cache = BlockCache(num_blocks=6, block_tokens=8)
    scheduler = partial(ContinuousScheduler, max_num_seqs=4, max_num_batched_tokens=32)
    engine, meter = metered(scheduler, cache, weights=EVEN, max_model_len=48)
    done = accounts(meter)
    for name in "abc":
        engine.add_request(
            name, f"prompt {name}", SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        )
    preempted = 0
    while engine.has_unfinished_requests():
        engine.step()
        preempted = max(preempted, len(engine.scheduler.waiting))
    assert preempted, "this cache is too small for all three"
    assert {name: used(account) for name, account in done.items()} == dict.fromkeys("abc", (0, 8, 16)), (
        "tokens computed again after a preemption are no tokens of the request"
    )
    assert meter.read().ns["recomputed"] > 0, "somebody has to pay for them: the operator"
    assert_all_is_given_out(meter, done)


def test_who_comes_back_from_swap_space_has_nothing_computed_again():
    cache = paged(8, num_swap_blocks=64, preemption_mode="swap", enable_prefix_caching=False)
    engine = pages_engine(cache, max_model_len=32)
    meter = CostMeter(DOLLAR_A_SECOND)
    engine.listeners.add(meter)
    done = accounts(meter)
    for name in "ab":
        engine.add_request(name, "a prompt", SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
    run_to_end(engine)
    assert cache.num_swapped > 0, "this cache is too small for both"
    assert meter.read().ns["recomputed"] == 0, "what was copied out and back was computed once"
    assert {used(account) for account in done.values()} == {(0, 8, 16)}
    assert_all_is_given_out(meter, done)


def test_an_aborted_request_pays_for_what_was_done(metered):
    engine, meter = metered(SEVERAL)
    done = accounts(meter)
    engine.add_request("a", "prompt", GREEDY)
    engine.add_request("waits", "x" * 60, GREEDY)
    engine.step(), engine.step()
    for name in ("a", "waits"):
        engine.abort_request(name)
    assert used(done["a"]) == (0, 6, 2)
    assert done["a"].reason == done["waits"].reason == "abort"
    assert done["a"].total_ns > 0
    assert_all_is_given_out(meter, done)


def test_a_failed_step_is_on_nobodys_account(metered):
    cache = BlockCache(64, 16)
    forward = FakeForward(cache)
    forward.fail_at[2] = RuntimeError("the cable came loose")
    engine, meter = metered(SEVERAL, cache, forward)
    done = accounts(meter)
    engine.add_request("a", "one", GREEDY)
    engine.step()
    paid = meter.unfinished()[0].total_ns
    engine.step()
    assert done["a"].reason == "error"
    assert done["a"].total_ns == paid, "the second step failed: nothing is added"
    assert meter.read().ns["failed"] > 0
    assert_all_is_given_out(meter, done)


@pytest.mark.parametrize("blocks", [64, 9])
def test_one_step_ahead_counts_the_same_tokens(blocks):
    """Steps that overlap, with preemptions in the small memory, and an end that is found out late."""
    engine = ahead(BlockCache(blocks, 8), listeners=Loud(), max_model_len=64)
    meter = CostMeter(DOLLAR_A_SECOND, EVEN)
    engine.listeners.add(meter)
    done = accounts(meter)
    prompts = {name: f"{name} is here" * 2 for name in "abcde"}
    for name, prompt in prompts.items():
        # Any token ends it: the step after the first is in flight by then, and for nothing.
        stop = list(range(256)) if name == "e" else []
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=stop)
        engine.add_request(name, prompt, params)
    run_to_end(engine)
    tokens = {name: used(account) for name, account in done.items()}
    assert tokens == {name: (0, 18, 1 if name == "e" else 12) for name in prompts}
    assert meter.read().ns["late"] > 0, "the step that was in flight when `e` ended"
    assert_all_is_given_out(meter, done)
    assert_idle(engine)
