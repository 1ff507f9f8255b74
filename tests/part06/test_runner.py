"""What a runner does with the parts it is handed."""

from dataclasses import replace

import pytest
import torch

from engine.execution.runner import HostCopy, Logits, ModelRunner
from engine.requests.batch import Batch, Copy
from engine.scheduling.scheduler import Queues
from tests.part06.fakes import BlockCache
from tests.part06.steps import make_request


@pytest.fixture
def batch() -> Batch:
    """Two sequences, each with a row that chooses."""
    requests = [make_request(name, prompt=1, output=1) for name in "ab"]
    return Queues(BlockCache(1, 1)).make_step([(request, 1) for request in requests]).batch


class Fixed:
    """A way whose likeliest token is always the same."""

    def __init__(self, token_id: int, max_sequences: int) -> None:
        self.token_id, self.max_sequences = token_id, max_sequences

    def fits(self, batch: Batch) -> bool:
        return len(batch.ids) <= self.max_sequences

    def __call__(self, batch: Batch) -> Logits:
        logits = torch.zeros(len(batch.rows.chosen), 10)
        logits[:, self.token_id] = 1
        return Logits(logits)


def greedy(logits: Logits, batch: Batch) -> torch.Tensor:
    return logits.values.argmax(dim=-1)


def test_the_first_way_that_fits_computes_the_pass(batch):
    runner = ModelRunner([Fixed(3, 1), Fixed(4, 2), Fixed(5, 9)], select=greedy)
    assert runner.way_number(batch) == 1
    assert runner.submit(batch).result().tokens == [[4], [4]]
    assert runner.submit(batch, 2).result().tokens == [[5], [5]], "somebody else has chosen the way"
    assert runner.submit(batch, 0).result().tokens == [[3], [3]], "the first way, too"


def test_what_comes_before_a_pass_hears_of_the_batch_in_order(batch):
    heard = []
    before = [lambda batch: heard.append(("first", batch.ids)), lambda batch: heard.append("second")]
    ModelRunner([Fixed(3, 9)], before=before, select=greedy).submit(batch)
    assert heard == [("first", ("a", "b")), "second"]


def test_what_scores_find_comes_home_as_it_was(batch):
    """Numbers of two kinds, whatever they are, beside the tokens; and nothing where nobody asks."""
    numbers = torch.tensor([[-0.1, float("nan"), 1e-40]]), torch.tensor([2**31 - 1, -5])

    class Score:
        def __init__(self, tensors):
            self.tensors, self.told_of = tensors, None

        def __call__(self, logits, token_ids, batch):
            return self.tensors

        def add_to(self, result, batch, token_ids, arrays):
            self.told_of = [token_ids, *arrays]
            return replace(result, counters={"told": 1.0})

    asked, silent = Score([*numbers]), Score(None)
    runner = ModelRunner([Fixed(3, 9)], select=greedy, scores=[silent, asked])
    result = runner.submit(batch).result()
    assert (result.tokens, result.counters, silent.told_of) == ([[3], [3]], {"told": 1.0}, None)
    token_ids, floats, ints = asked.told_of
    assert token_ids.tolist() == [3, 3]
    assert torch.equal(torch.from_numpy(floats).view(torch.int32), numbers[0].view(torch.int32)), "bit by bit"
    assert ints.tolist() == numbers[1].tolist()


def test_copies_that_nobody_can_make_are_refused(batch):
    copied = replace(batch, copies=(Copy(0, "fork", (1,), (2,)),))
    with pytest.raises(ValueError, match="1 copies of blocks, and this runner has no memory"):
        ModelRunner([Fixed(3, 9)], select=greedy).submit(copied)


def test_a_copy_on_the_host_holds_what_the_tensor_held_when_it_was_begun():
    tensor = torch.tensor([3, 4])
    copied = HostCopy(tensor)
    tensor.fill_(9)
    assert copied.read().tolist() == [3, 4]
