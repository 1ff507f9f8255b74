"""Which numbers of a tensor are whose: small tensors, a rule each."""

import pytest
import torch

from engine.parallel.shards import cut

WEIGHT = torch.arange(48.0).view(4, 12)  # 4 outputs, 12 inputs


def test_a_layer_that_is_cut_by_its_outputs():
    """A layer's weight is [out, in]: rank 1 of 2 has the second half of the rows."""
    first, second = (cut(WEIGHT, 0, rank, 2).tolist() for rank in range(2))
    assert first != WEIGHT[2:].tolist(), "rank 0 has the first run, and not the last"
    assert first == WEIGHT[:2].tolist(), "rank 0 has the first rows: neighbours, and not every second row"
    assert second == WEIGHT[2:].tolist(), "rank 1 has the rows after those of rank 0"


def test_a_layer_that_is_cut_by_its_inputs():
    weight = torch.arange(36).view(3, 12)
    part = cut(weight, 1, 1, 3)
    assert len(part) == 3, "cut along dim 1, the rows stay whole: columns are divided"
    assert part.tolist() == weight[:, 4:8].tolist(), "of three runs of columns, rank 1 has the middle one"


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("dim", [0, 1])
def test_the_parts_side_by_side_are_the_whole(size, dim):
    parts = [cut(WEIGHT, dim, rank, size) for rank in range(size)]
    assert torch.equal(torch.cat(parts, dim), WEIGHT), "every number is some rank's, and no two ranks'"


def test_matrices_that_lie_side_by_side():
    """GPT-2 has queries, keys and values in one tensor: a rank needs a part of each."""
    q, k, v = [0, 1, 2, 3], [10, 11, 12, 13], [20, 21, 22, 23]
    tensor = torch.tensor([q + k + v] * 2)  # [2, 3 · 4]
    cut_tensor = cut(tensor, 1, 1, 2, matrices=3)
    assert isinstance(cut_tensor, torch.Tensor), "the result is one tensor, with the parts side by side"
    assert cut_tensor.shape == (2, 6), "[2, 3 · 2]: the parts lie side by side along dim, and the rows stay"
    part, same = cut_tensor.tolist()
    assert sorted(part) == [2, 3, 12, 13, 22, 23], (
        "each of the matrices is cut: a run of the whole tensor would be one rank's queries, another's keys"
    )
    assert part == [2, 3, 12, 13, 22, 23], (
        "the parts lie side by side in order: some queries, then some keys, then some values"
    )
    assert same == part, "each row is cut alike"


def test_matrices_along_the_first_dimension():
    """As their bias is: one number for each output."""
    bias = torch.tensor([0, 1, 2, 3, 10, 11, 12, 13])
    assert cut(bias, 0, 0, 2, matrices=2).tolist() == [0, 1, 10, 11], "rank 0 has the first half of each"


def test_one_matrix_is_not_copied():
    """Of a file that is mapped into memory, only a rank's part is read."""
    for dim in (0, 1):
        part = cut(WEIGHT, dim, 1, 2)
        assert part.untyped_storage().data_ptr() == WEIGHT.untyped_storage().data_ptr(), "a view, not a copy"
