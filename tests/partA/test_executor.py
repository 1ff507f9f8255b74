"""Rank 0's executor and the other ranks' loop, with runners and processes that stand in."""

import io
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine.parallel.executor import LeadingExecutor, SharedTokens, StepOnAllRanks, follow
from engine.parallel.group import SUM_SECONDS
from engine.parallel.launch import RankLost
from engine.parallel.orders import STEP, STOP, step_from, step_payload, write_order
from engine.parallel.rank import ProcessRank
from tests.partA.test_orders import NUMBERS


@pytest.fixture
def batch():
    return step_from(np.array(NUMBERS, dtype=np.int64))


class Workers:
    """Notes what is called, in one list with what the test notes."""

    def __init__(self) -> None:
        self.log: list = []

    def send_order(self, kind, payload=b""):
        self.log.append(("told", kind, payload))

    def wait_for(self, is_done, seconds):
        self.log.append(("waited", is_done, seconds))

    def stop(self):
        self.log.append("stopped")

    @contextmanager
    def raising_rank_lost(self):
        try:
            yield
        except Exception as error:
            raise RankLost(str(error)) from error


class Runner:
    """Computes nothing; its second way fits."""

    def __init__(self, log: list) -> None:
        self.log, self.ways = log, ["first", "second"]

    def way_number(self, batch):
        return 1

    def submit(self, batch, way_number):
        self.log.append(("submitted", way_number))
        return SimpleNamespace(is_done=self.log.clear, result=lambda: self.log.append("read"))


def test_a_step_is_told_with_its_way_and_then_begun_and_watched(batch):
    """The others compute it while rank 0 does; and no wait for the device is without a limit."""
    workers = Workers()
    runner = Runner(workers.log)
    step = LeadingExecutor(runner, workers, None).submit(batch)
    numbers = [*NUMBERS[:5], 0, 1, *NUMBERS[7:]]  # sequences are numbered from 0 on
    assert workers.log == [("told", STEP, step_payload(1, np.array(numbers))), ("submitted", 1)]
    workers.log.clear()
    assert isinstance(step, StepOnAllRanks)
    step.result()
    assert workers.log == [("waited", step.step.is_done, SUM_SECONDS), "read"], "the wait comes first"


@pytest.mark.parametrize("where", ["submit", "result"])
def test_what_fails_behind_an_order_is_a_rank_lost(batch, where):
    """Out of memory on the device, say: the others wait in this step's sums."""
    workers = Workers()
    runner = Runner(workers.log)

    def fail(*_):
        raise RuntimeError("no memory")

    if where == "submit":
        runner.submit = fail
        with pytest.raises(RankLost, match="no memory"):
            LeadingExecutor(runner, workers, None).submit(batch)
        return
    step = LeadingExecutor(runner, workers, None).submit(batch)
    step.step.result = fail
    with pytest.raises(RankLost, match="no memory"):
        step.result()


def test_graphs_are_freed_before_the_others_end():
    """NCCL's sums are inside of them."""
    workers = Workers()
    runner = Runner(workers.log)
    workers.stop = lambda: workers.log.append(list(runner.ways))
    LeadingExecutor(runner, workers, None).shutdown()
    assert workers.log == [[]]


def test_tokens_of_a_step_with_drafts_are_not_sent():
    """Such a step lands before the next is launched, and no rank looks at them."""
    sent, kept = [], []
    group = SimpleNamespace(device="cpu", broadcast=lambda x: sent.append(x) or x + 1)
    tokens = SharedTokens(SimpleNamespace(remember=lambda batch, ids: kept.append(ids.tolist())), group)
    for has_drafts in (True, False):
        tokens.remember(SimpleNamespace(has_drafts=has_drafts), torch.tensor([3]))
    assert kept == [[3], [4]], "what the group gives is kept: rank 0's tokens"
    assert len(sent) == 1


def test_another_rank_computes_each_step_by_the_way_it_is_told(batch):
    orders, seen = io.BytesIO(), []
    for way in (1, 0, 1):
        write_order(orders, STEP, step_payload(way, np.array(NUMBERS)))
    write_order(orders, STOP)
    orders.seek(0)
    follow(SimpleNamespace(submit=lambda batch, way_number: seen.append(way_number)), None, orders)
    assert seen == [1, 0, 1]


def test_an_adapter_that_cannot_be_sent_is_a_rank_lost():
    """The other ranks would compute with what was in the slot before."""
    slots = SimpleNamespace(on_assign=[])
    LeadingExecutor(Runner([]), Workers(), slots)
    with pytest.raises(RankLost):
        slots.on_assign[0](0, "no adapter")


@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_rank_makes_of_its_runner(rank):
    """Only rank 0 chooses and scores; all keep rank 0's tokens."""
    group = SimpleNamespace(
        rank=rank, size=2, device=torch.device("cpu"), all_reduce_min=None, all_reduce_sum=None
    )
    workers = Workers() if rank == 0 else None
    runner = SimpleNamespace(ways=["graphs", "eager"], select="draws", scores=["scores"], last_tokens="last")
    part = ProcessRank(group, workers)
    executor = part.executor(runner, None)
    assert isinstance(runner.last_tokens, SharedTokens)
    assert part.chooses == (rank == 0)
    assert part.num_on_host == 2, "both take memory of this machine"
    if rank == 0:
        assert isinstance(executor, LeadingExecutor)
        assert (runner.ways, runner.select, runner.scores) == (["graphs", "eager"], "draws", ["scores"])
    else:
        assert executor is runner
        assert runner.scores == [], "no logits are here that could be scored"
        assert runner.ways == ["graphs", "eager"], "those of rank 0, in the same order"
    group.device = torch.device("cuda:0")
    assert ProcessRank(group, workers).num_on_host == 1, "each has a GPU"
