"""The cache for one sequence at a time: who has the buffer, and that a step reads what is its own."""

import pytest
import torch

from engine.cache.buffer import BufferCache, BufferMemory
from engine.cache.single import CachedForward
from engine.execution.runner import EagerWay
from engine.scheduling.scheduler import Queues
from tests.part06.fakes import CONFIG
from tests.part06.steps import make_request


@pytest.fixture
def cache():
    return BufferCache(max_tokens=50)


def test_a_second_sequence_comes_in_once_the_first_has_left(cache):
    a, b = make_request("a", 3, 1), make_request("b", 3, 1)
    assert (cache.admit(a), cache.admit(b)) == (0, None)
    assert set(cache.draft_progress) == {"a"}
    cache.release(a)
    assert cache.admit(b) == 0
    assert set(cache.draft_progress) == {"b"}


@pytest.mark.parametrize("leave", ["release", "preempt"])
def test_leaving_twice_takes_the_buffer_from_nobody_else(cache, leave):
    a, b = make_request("a", 3, 1), make_request("b", 3, 1)
    cache.admit(a)
    getattr(cache, leave)(a)
    cache.admit(b)
    cache.release(a)
    cache.release(make_request("never here", 3, 1))
    assert cache.admit(a) is None, "b has the buffer, whoever leaves once more"


@pytest.mark.parametrize(("num_tokens", "room"), [(1, True), (50, True), (51, False)])
def test_the_buffer_is_as_long_as_it_is(cache, num_tokens, room):
    request = make_request("a", 3, 1)
    cache.admit(request)
    assert cache.reserve(request, num_tokens) is room
    assert cache.fits(num_tokens) is room


def test_usage_counts_the_whole_buffer(cache):
    usage = cache.usage()
    assert (usage.num_sequences, usage.tokens_held, usage.tokens_total) == (0, 0, 50)
    cache.admit(make_request("a", 3, 1))
    usage = cache.usage()
    assert (usage.num_sequences, usage.tokens_held, usage.tokens_total) == (1, 50, 50)


def test_the_buffer_is_as_long_as_the_model_sees_unless_told_otherwise():
    assert BufferMemory(CONFIG).plan().max_tokens == CONFIG.max_positions
    for max_tokens in (7, 0):
        assert BufferMemory(CONFIG, max_tokens=max_tokens).plan().max_tokens == max_tokens


@pytest.fixture
def queues(model):
    """(scheduler, way): what makes a record of a step, and what computes it."""
    memory = BufferMemory(model.config)
    return Queues(memory.plan()), EagerWay(model, memory)


def test_a_sequence_has_the_logits_of_part_3s_cache_whoever_was_there_before(model, queues):
    scheduler, way = queues
    for name, prompt in {"long": 30, "short": 4}.items():
        request, expected = make_request(name, prompt, 9), CachedForward(model)
        scheduler.cache.admit(request)
        for new in (prompt - 1, 1, 1, 1):  # a prompt in two chunks, then a token a step
            logits = way(scheduler.make_step([(request, new)]).batch).values
            if request.num_tokens_to_compute == 0:
                assert (logits[0] - expected(request.token_ids)).abs().max() <= 1e-4
                request.token_ids.append(int(logits[0].argmax()))
        scheduler.cache.release(request)


def test_a_step_that_is_computed_again_gives_the_same_logits(model, queues):
    scheduler, way = queues
    request = make_request("a", 6, 9)
    scheduler.cache.admit(request)
    for _ in range(2):
        batch = scheduler.make_step([(request, request.num_tokens_to_compute)]).batch
        first, again = way(batch).values, way(batch).values
        assert torch.equal(first, again), "a record says where its tokens lie; the memory counts nothing"
        request.token_ids.append(int(first[0].argmax()))
