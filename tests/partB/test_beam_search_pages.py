"""The beams of a search share blocks: no key is computed twice, each block is stored once, none is left."""

from dataclasses import replace

import pytest

from engine.cache.slots import SlotMemory
from engine.core.beam_search import BeamSearch
from engine.core.llm_engine import LLMEngine
from engine.decoding.beam_search import BeamSearchParams
from engine.decoding.logprobs import SUPPORTS
from engine.decoding.params import ParameterError, SamplingParams
from engine.execution.runner import ModelRunner
from engine.execution.scores import ChosenLogprobs
from engine.scheduling.continuous import ContinuousScheduler
from engine.scheduling.elastic import ElasticScheduler
from tests.part06.fakes import CONFIG, EOS, TOKENIZER, assert_idle, fake_logits, run_to_end, told_alone
from tests.part12.pages import TWO_LAYERS, P, PageReader, WatchedCache, reader_of
from tests.partB.searching import plain_search, search, watched

LONG = list(range(60, 83))  # 23 tokens: five full blocks and three tokens
PROMPTS = [LONG, [65], LONG[:8], [*LONG[:9], 7]]


@pytest.fixture
def make(passed):
    """make(num_blocks, seats, budget, kind) -> an engine whose pages are read back, and which ends empty."""
    made = []

    def engine(num_blocks=96, seats=12, budget=64, kind=ContinuousScheduler, **options) -> LLMEngine:
        cache = WatchedCache(TWO_LAYERS, num_blocks, P, **options)
        runner = ModelRunner(
            [PageReader(cache)], cache.memory, before=[cache.check], scores=[ChosenLogprobs(TOKENIZER)]
        )
        scheduler = kind(cache, seats, budget)
        recover = {"recover": scheduler.recover} if kind is ElasticScheduler else {}
        config = replace(CONFIG, max_positions=min(CONFIG.max_positions, num_blocks * P))
        made.append(LLMEngine(TOKENIZER, config, scheduler, runner, supports=SUPPORTS, **recover))
        return made[-1]

    yield engine
    for each in made if passed() else ():
        assert_idle(each)
        assert not any(each.scheduler.cache.blocks.references), "a block has a reference"


def found(sequences, prompt) -> list:
    return [
        (sequence.tokens[len(prompt) :], pytest.approx(sequence.score, abs=1e-4)) for sequence in sequences
    ]


def computed(watch) -> list[tuple]:
    """Of each key that was computed: whose search it was, its token, and all tokens before it."""
    keys = []
    for batch in watch.batches:
        for s, name in enumerate(batch.ids):
            token_ids = watch.cache.sequences[name].token_ids  # of which the last may have come since
            end = batch.context_lens[s]
            first = end - batch.num_new_tokens(s)
            keys += [(name.split("/")[0], *token_ids[: place + 1]) for place in range(first, end)]
    return keys


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_the_answers_are_those_of_a_search_without_a_cache(make, width, penalty):
    params = BeamSearchParams(width, 14, length_penalty=penalty)
    for prompt, sequences in zip(PROMPTS, search(make(), PROMPTS, params), strict=True):
        expected = plain_search(fake_logits, prompt, params, frozenset({EOS}))
        assert found(sequences, prompt) == expected


@pytest.mark.parametrize(("seats", "budget", "num_blocks"), [(12, 64, 96), (4, 5, 96), (4, 64, 30)])
def test_no_key_is_computed_twice(make, seats, budget, num_blocks):
    """Not even where a long prompt leaves no room in a step for the forks of another."""
    engine = make(num_blocks, seats, budget)
    watch = watched(engine)
    params = BeamSearchParams(4, 14, ignore_eos=True)
    answers = search(engine, PROMPTS, params)
    for prompt, sequences in zip(PROMPTS, answers, strict=True):
        expected = plain_search(fake_logits, prompt, params, frozenset())
        assert found(sequences, prompt) == expected
    keys = computed(watch)
    assert len(keys) == len(set(keys)), "a token with the same tokens before it was computed twice"


def test_a_step_computes_the_prompt_or_a_token_of_each_beam(make):
    engine = make()
    watch = watched(engine)
    search(engine, [LONG], BeamSearchParams(4, 10, ignore_eos=True))
    assert [batch.num_tokens for batch in watch.batches] == [len(LONG), *[4] * 9], (
        "the prompt once, then one token of each of four beams in nine steps: the last token has no key"
    )
    assert reader_of_watched(engine).computed == len(LONG) + 4 * 9


def reader_of_watched(engine) -> PageReader:
    return engine.executor.executor.ways[0]


def test_the_prompts_full_blocks_are_stored_once_for_all_beams(make):
    engine = make()
    watch = watched(engine)
    search(engine, [LONG], BeamSearchParams(4, 10, ignore_eos=True))
    for tables, references in zip(watch.tables[1:], watch.references[1:], strict=True):
        beginnings = {tuple(table[:5]) for table in tables.values()}
        assert (len(tables), len(beginnings)) == (4, 1), "all beams begin with the same five blocks"
        (beginning,) = beginnings
        assert [references[block] for block in beginning] == [4] * 5, "each of them has four references"
        last = [table[-1] for table in tables.values()]
        assert [references[block] for block in last] == [1] * 4, "the block that a beam writes is its own"
    most = max(sum(map(bool, references)) for references in watch.references)
    assert most <= 5 + 4 * 3, "23 + 9 tokens are eight blocks: five shared, three for each beam"


def test_a_fork_copies_the_last_block_and_no_full_one(make):
    engine = make()
    watch = watched(engine)
    search(engine, [LONG], BeamSearchParams(4, 10, ignore_eos=True))
    copies = [copy for batch in watch.batches for copy in batch.copies]
    assert {(copy.kind, len(copy.source)) for copy in copies} == {("fork", 1)}
    assert len(watch.batches[1].copies) == 3, "after the prompt, three forks: the first goes on in its blocks"
    exact = make()
    watch = watched(exact)
    search(exact, [LONG[:20]], BeamSearchParams(4, 2, ignore_eos=True))
    assert watch.batches[1].copies == (), "a prompt of full blocks is shared without any copy"


def test_a_second_search_finds_the_first_ones_prompt(make):
    engine = make()
    params = BeamSearchParams(2, 4)
    first = search(engine, [LONG], params)
    watch = watched(engine)
    assert found(search(engine, [LONG], params)[0], LONG) == [
        (each.tokens[len(LONG) :], each.score) for each in first[0]
    ]
    assert watch.batches[0].num_tokens == 3, "the prefix cache has the prompt's full blocks"


def test_several_prompts_share_their_steps(make):
    engine = make(seats=8)
    watch = watched(engine)
    search(engine, PROMPTS[1:3], BeamSearchParams(4, 6, ignore_eos=True))
    assert [len(batch.ids) for batch in watch.batches] == [2, 8, 8, 8, 8, 8]
    one_by_one = make(seats=8)
    watch = watched(one_by_one)
    search(one_by_one, PROMPTS[1:3], BeamSearchParams(4, 6, ignore_eos=True), concurrency_limit=1)
    assert [len(batch.ids) for batch in watch.batches] == [1, 4, 4, 4, 4, 4] * 2


def test_the_seats_limit_how_many_prompts_run_at_once(make):
    engine = make(seats=7)
    watch = watched(engine)
    search(engine, PROMPTS, BeamSearchParams(3, 5))
    assert max(len(batch.ids) for batch in watch.batches) <= 6, "two prompts of three beams, and no third"


def test_too_wide_a_search_is_refused_with_numbers_before_anything_is_computed(make):
    engine = make(num_blocks=28, seats=16)
    watch = watched(engine)
    words = (
        "beam_width=8: 8 beams of up to 32 tokens, of which they share 20, may need 29 blocks of 4 tokens, "
        "and the cache has 28"
    )
    with pytest.raises(ParameterError, match=words) as refused:
        search(engine, [[65], LONG], BeamSearchParams(8, 10))
    assert refused.value.field == "beam_width"
    assert watch.batches == [], "nothing was computed"
    (sequences,) = search(engine, [LONG], BeamSearchParams(7, 10))
    assert len(sequences) == 7, "what fits by these numbers runs"


def test_more_beams_than_seats_are_refused(make):
    with pytest.raises(ParameterError, match=r"beam_width=13: .* at most max_num_seqs=12 run at once"):
        BeamSearch(make(), BeamSearchParams(13, 2))


def test_a_cache_of_slots_is_refused():
    memory = SlotMemory(TWO_LAYERS, 4)
    scheduler = ContinuousScheduler(memory.plan(), 4, 64)
    engine = LLMEngine(TOKENIZER, CONFIG, scheduler, ModelRunner([]), supports=SUPPORTS)
    with pytest.raises(ParameterError, match="kv_cache='paged'") as refused:
        BeamSearch(engine, BeamSearchParams(2, 2))
    assert refused.value.field == "kv_cache"


def test_an_engine_with_other_requests_is_refused_and_goes_on(make):
    engine = make()
    greedy = SamplingParams(temperature=0, max_tokens=6)
    engine.add_request("a", "Tom", greedy)
    engine.step()
    with pytest.raises(RuntimeError, match="needs an idle engine, and 1 requests are under way"):
        BeamSearch(engine, BeamSearchParams(2, 2))
    assert run_to_end(engine)["a"].outputs[0].token_ids == told_alone("Tom", greedy).token_ids


@pytest.mark.parametrize("prompt", [[], [999], list(range(200))])
def test_a_prompt_that_a_request_may_not_have_is_refused(make, prompt):
    with pytest.raises(ParameterError, match="prompt"):
        search(make(), [[65], prompt], BeamSearchParams(2, 4))


@pytest.mark.parametrize(
    "error", [ArithmeticError("broken"), KeyboardInterrupt()], ids=["error", "interrupt"]
)
def test_a_failed_or_interrupted_step_leaves_nothing(make, error):
    engine = make()
    reader, params = reader_of(engine), BeamSearchParams(3, 8, ignore_eos=True)

    def fail_later(batch) -> None:
        if reader.steps == 3:
            reader.fail_next = error

    engine.executor.before.append(fail_later)
    kind = RuntimeError if isinstance(error, Exception) else KeyboardInterrupt
    with pytest.raises(kind):
        search(engine, PROMPTS[:2], params)
    assert_idle(engine)
    engine.executor.before.remove(fail_later)
    again = search(engine, PROMPTS[:2], params)
    for prompt, sequences in zip(PROMPTS, again, strict=False):
        assert found(sequences, prompt) == plain_search(fake_logits, prompt, params, frozenset()), (
            "what a failed step left in the pages is not read"
        )


def test_a_step_without_memory_is_made_again_in_smaller_steps(make):
    engine = make(kind=ElasticScheduler)
    reader, params = reader_of(engine), BeamSearchParams(3, 8, ignore_eos=True)
    reader.fail_next = MemoryError("out of memory")
    (sequences,) = search(engine, [LONG], params)
    assert found(sequences, LONG) == plain_search(fake_logits, LONG, params, frozenset())
    assert engine.scheduler.num_out_of_memory == 1


def test_beams_that_no_step_has_room_for_any_more_fail(make):
    """Memory ran out in a step of three beams, so that two may run at once."""
    params = BeamSearchParams(3, 8, ignore_eos=True)
    search(make(kind=ElasticScheduler), [LONG], params)  # with memory enough, nothing fails
    engine = make(kind=ElasticScheduler)
    reader = reader_of(engine)

    def fail_later(batch) -> None:
        if reader.steps == 3:
            reader.fail_next = MemoryError("out of memory")

    engine.executor.before.append(fail_later)
    with pytest.raises(RuntimeError, match="no step has room for all beams any more"):
        search(engine, [LONG], params)
