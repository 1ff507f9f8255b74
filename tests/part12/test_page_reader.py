"""Pages read in C: the attention of double precision, whatever the shape, and each row for itself."""

import numpy as np
import pytest
import torch

from engine.attention import page_reader
from engine.attention.page_reader import PageReader

pytestmark = pytest.mark.skipif(not page_reader.is_available(), reason="our C wants a compiler")


def scene(lens, block_size, heads, kv_heads, Dh, seed=0, left_behind=torch.nan):
    """(tables, lens, q, keys, values): blocks in any order, and in what nobody has, `left_behind`."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-n // block_size) for n in lens]
    blocks = torch.randperm(sum(counts) + 3, generator=generator)[: sum(counts)].numpy()
    tables = np.zeros((len(lens), max(counts)), dtype=np.int64)
    shape = sum(counts) + 3, block_size, kv_heads, Dh
    keys, values = torch.randn(2, *shape, generator=generator)
    free = torch.ones(shape[:2], dtype=torch.bool)
    for row, n, own in zip(tables, lens, np.split(blocks, np.cumsum(counts)[:-1]), strict=True):
        row[: len(own)] = own
        for t in range(n):
            free[own[t // block_size], t % block_size] = False
    for memory in (keys, values):
        memory[free] = left_behind
    q = torch.randn(len(lens), heads, Dh, generator=generator)
    return tables, np.array(lens), q, keys, values


def expected(tables, lens, q, keys, values):
    """The same in double precision, sequence by sequence."""
    group, P, out = q.shape[1] // keys.shape[2], keys.shape[1], []
    for row, n, own in zip(tables, lens, q.double(), strict=True):
        at = torch.from_numpy(row[np.arange(n) // P] * P + np.arange(n) % P)
        k, v = (
            m.flatten(0, 1)[at].double().repeat_interleave(group, 1) for m in (keys, values)
        )  # [n, Hq, Dh]
        scores = torch.einsum("hd,nhd->hn", own, k) * own.shape[-1] ** -0.5
        out.append(torch.einsum("hn,nhd->hd", scores.softmax(-1), v))
    return torch.stack(out)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1), (6, 2), (1, 1)])
@pytest.mark.parametrize(
    ("block_size", "Dh"), [(1, 8), (3, 5), (7, 64), (8, 1), (16, 64), (20, 130), (64, 33)]
)
def test_equals_double_precision(heads, kv_heads, block_size, Dh):
    given = scene([1, 2, 7, 8, 9, 16, 31, 65, 200], block_size, heads, kv_heads, Dh)
    tables, lens, *tensors = given
    out = PageReader(tables, lens)(*tensors)
    assert (out - expected(*given)).abs().max() <= 2e-6, "and NaN that others left reaches nobody"


def test_a_program_that_prefers_other_numbers_gets_the_same():
    tables, lens, *tensors = scene([3, 9], 4, 4, 2, 8)
    want = PageReader(tables, lens)(*tensors)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(PageReader(tables, lens)(*tensors), want)
    finally:
        torch.set_default_dtype(torch.float32)


def test_scores_far_apart():
    """Weights from 1 to nothing, rising and falling: each new largest makes smaller what was there."""
    tables, lens, q, keys, values = scene([300, 300], 16, 2, 2, 4, left_behind=0.0)
    steps = torch.linspace(-200, 200, 300)
    for row, sign in zip(tables, (1, -1), strict=True):
        at = torch.from_numpy(row[np.arange(300) // 16] * 16 + np.arange(300) % 16)
        keys.flatten(0, 1)[at] = (sign * steps)[:, None, None].expand(300, 2, 4)
    q.fill_(0.7)
    out = PageReader(tables, lens)(q, keys, values)
    assert (out - expected(tables, lens, q, keys, values)).abs().max() <= 1e-5
    q.fill_(40.0)
    assert PageReader(tables, lens)(q, keys, values).isfinite().all()


def test_queries_may_be_views():
    tables, lens, q, keys, values = scene([5, 40], 8, 4, 2, 16)
    want = PageReader(tables, lens)(q, keys, values)
    packed = torch.stack([q, q + 1, q + 2], 1)  # [S, 3, Hq, Dh], as a model's projection gives it
    assert torch.equal(PageReader(tables, lens)(packed[:, 0], keys, values), want)
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(PageReader(tables, lens)(turned, keys, values), want)
    assert torch.equal(PageReader(tables.astype(np.int32), lens.astype(np.int32))(q, keys, values), want)


def test_a_row_is_the_same_whoever_is_beside_it_and_however_many_threads():
    tables, lens, q, keys, values = scene([3, 90, 17, 41], 16, 6, 3, 32)
    want = PageReader(tables, lens)(q, keys, values)
    for threads in (1, 2, 3, 9):
        torch.set_num_threads(threads)
        try:
            assert torch.equal(PageReader(tables, lens)(q, keys, values), want), "to the last bit"
            for s in range(4):
                alone = PageReader(tables[s : s + 1], lens[s : s + 1])(q[s : s + 1], keys, values)
                assert torch.equal(alone[0], want[s])
        finally:
            torch.set_num_threads(1)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_number_that_is_none_spoils_its_own_sequence(bad):
    tables, lens, q, keys, values = scene([20, 20], 8, 2, 2, 8)
    want = PageReader(tables, lens)(q, keys, values)
    keys[tables[0, 1], 2] = bad
    q[0] = q[0].abs()
    out = PageReader(tables, lens)(q, keys, values)
    assert out[0].isnan().all(), "nothing that could be taken for a result"
    assert torch.equal(out[1], want[1])
