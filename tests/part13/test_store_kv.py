"""New keys and values into their pages: each rule of `_store` by itself, then all at once."""

import pytest
import torch

pytest.importorskip("triton", reason="needs the package triton")

from engine.kernels.store_kv import store_kv
from tests.part13.test_paged_attention import DEVICE, P

BLOCKS = 3


def pages(Hkv: int, Dh: int):
    """Keys and values of BLOCKS empty blocks. A block on either side is nobody's: a kernel that writes past
    an end does no harm but to the test.
    """
    memory = torch.zeros(2, BLOCKS + 2, P, Hkv, Dh, device=DEVICE)
    return memory, memory[0, 1:-1], memory[1, 1:-1]


def tokens(T: int, Hkv: int, Dh: int):
    """k and v[T, Hkv, Dh] of whole numbers from 1 on, each in a tensor of its own."""
    x = torch.arange(1, 2 * T * Hkv * Dh + 1, dtype=torch.float32, device=DEVICE).view(2, T, Hkv, Dh)
    return x[0].clone(), x[1].clone()


def test_a_tokens_numbers_lie_in_its_slot():
    memory, keys, values = pages(2, 4)
    k, v = tokens(1, 2, 4)
    store_kv(k, v, keys, values, torch.tensor([P + 3], device=DEVICE))
    assert torch.equal(keys[1, 3], k[0]), "slot 19 is block 1, place 3: token 0's key lies there"
    assert torch.equal(values[1, 3], v[0]), "v's numbers go to the values"
    memory[:, 2, 3] = 0
    assert not memory.any(), "nothing else was written"


def test_every_token_goes_to_its_own_slot():
    _, keys, values = pages(2, 4)
    k, v = tokens(3, 2, 4)
    store_kv(k, v, keys, values, torch.tensor([40, 0, 17], device=DEVICE))
    for memory, x in ((keys, k), (values, v)):
        assert torch.equal(memory.flatten(0, 1)[[40, 0, 17]], x), (
            "program t takes token t and its slot; slot 0 is a slot like any other"
        )


def test_tokens_of_a_fused_layer_lie_apart():
    _, keys, values = pages(2, 4)
    k = torch.randn(3, 3, 2, 4, device=DEVICE)[:, 1]  # of q, k and v in one row: 24 numbers apart
    v = torch.randn(3, 2, 2, 4, device=DEVICE)[:, 1]  # 16 apart
    store_kv(k, v, keys, values, torch.tensor([1, 2, 3], device=DEVICE))
    assert torch.equal(keys[0, 1:4], k), "token t's key begins k_token · t numbers into k"
    assert torch.equal(values[0, 1:4], v), "token t's value begins v_token · t numbers into v"


def test_no_more_than_a_tokens_numbers_are_written():
    memory, keys, values = pages(3, 4)  # 12 numbers, padded to 16
    k, v = tokens(1, 3, 4)
    store_kv(k, v, keys, values, torch.tensor([5], device=DEVICE))
    assert torch.equal(keys[0, 5], k[0]), "rows of keys[B · P, WIDTH] are WIDTH numbers apart, not PADDED"
    assert torch.equal(values[0, 5], v[0])
    memory[:, 1, 5] = 0
    assert not memory.any(), "PADDED numbers are taken, only WIDTH of them are written"


def test_a_slot_of_minus_one_is_no_token():
    memory, keys, values = pages(2, 4)
    k, v = tokens(3, 2, 4)
    store_kv(k, v, keys, values, torch.tensor([7, -1, 8], device=DEVICE))
    assert torch.equal(keys[0, 7:9], k[[0, 2]]), "the tokens beside it are stored"
    memory[:, 1, 7:9] = 0
    assert not memory.any(), "a slot of -1: nothing is written"


def test_no_tokens():
    memory, keys, values = pages(2, 4)
    store_kv(*tokens(0, 2, 4), keys, values, torch.tensor([], device=DEVICE, dtype=torch.long))
    assert not memory.any()


def test_half_precision_is_stored_as_it_is():
    k, v = torch.randn(2, 4, 2, 32, device=DEVICE).to(torch.float16)
    keys, values = torch.zeros(2, BLOCKS, P, 2, 32, device=DEVICE, dtype=torch.float16)
    slots = torch.tensor([5, 40, -1, 0], device=DEVICE)
    store_kv(k, v, keys, values, slots)
    for memory, x in ((keys, k), (values, v)):
        assert torch.equal(memory.flatten(0, 1)[[5, 40, 0]], x[[0, 1, 3]]), "each token lies in its slot"
