"""Part 4's fixtures, and engines that are looked at when their test is over: nothing may be left in them."""

import pytest

from engine.cache.buffer import BufferMemory
from engine.core.engine_thread import EngineThread
from engine.core.llm_engine import LLMEngine
from engine.execution.runner import EagerWay, ModelRunner
from engine.requests.listeners import Listeners
from engine.scheduling.fifo import FIFOScheduler
from tests.part04.conftest import alone, model, tokenizer  # noqa: F401
from tests.part06.fakes import (
    CONFIG,
    TOKENIZER,
    BlockCache,
    FakeForward,
    Gate,
    Recorder,
    assert_idle,
    at_rest,
)

PASSED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "call":
        item.stash[PASSED] = report.passed
    return report


@pytest.fixture
def passed(request):
    """passed() -> whether the test itself went well: what a failed one left behind is no news."""
    return lambda: request.node.stash.get(PASSED, False)


@pytest.fixture
def fake_engine(passed):
    """fake_engine(make_scheduler, cache, **options) -> an LLMEngine over the fake model."""
    made = []

    def make(make_scheduler=FIFOScheduler, cache=None, forward=None, executor=None, **options) -> LLMEngine:
        cache = cache or BlockCache(num_blocks=64, block_tokens=16)
        executor = executor or ModelRunner([forward or FakeForward(cache)])
        made.append(LLMEngine(TOKENIZER, CONFIG, make_scheduler(cache), executor, **options))
        return made[-1]

    yield make
    for engine in made if passed() else ():
        assert_idle(engine)


@pytest.fixture
def real_engine(passed, model, tokenizer):  # noqa: F811
    """real_engine(make_scheduler, memory, **options) -> an LLMEngine over the trained model.

    Without a memory it has room for one sequence.
    """
    made = []

    def make(make_scheduler=FIFOScheduler, memory=None, **options) -> LLMEngine:
        memory = memory or BufferMemory(model.config)
        executor = ModelRunner([EagerWay(model, memory)], memory)
        made.append(LLMEngine(tokenizer, model.config, make_scheduler(memory.plan()), executor, **options))
        return made[-1]

    yield make
    for engine in made if passed() else ():
        assert_idle(engine)


@pytest.fixture
def gate() -> Gate:
    """What `engine` waits at before each step."""
    return Gate(FakeForward(BlockCache(64, 16)))


@pytest.fixture
def engine(fake_engine, gate, passed):
    """An engine in its own thread that makes as many steps as the test allows, and is recorded."""
    engine = fake_engine(cache=gate.forward.cache, forward=gate, listeners=Listeners([Recorder()]))
    with at_rest(EngineThread(engine, "fake"), passed) as running:
        running.start()
        yield running
        gate.open()
