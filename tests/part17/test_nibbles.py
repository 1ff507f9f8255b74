"""Two codes of four bits share a byte."""

import pytest
import torch

from engine.quantization.codes import pack_nibbles, unpack_nibbles


def test_the_worked_example_of_the_article():
    nibbles = pack_nibbles(torch.tensor([[3, 10, 15, 0]], dtype=torch.uint8))
    assert nibbles.tolist() == [[3 + 16 * 10, 15 + 16 * 0]], (
        "the even one in the lower four bits: 3 + 16 · 10"
    )


def test_unpacking_the_articles_example():
    codes = unpack_nibbles(torch.tensor([[163, 15]], dtype=torch.uint8), 4)
    assert codes.tolist() == [[3, 10, 15, 0]], "163 is 3 + 16 · 10: the lower four bits come first"


def test_a_code_takes_a_byte_when_it_is_unpacked():
    codes = unpack_nibbles(torch.tensor([[163]], dtype=torch.uint8), 2)
    assert codes.dtype == torch.uint8, "codes come out in uint8, as they went in: a byte each, not eight"


def test_packed_codes_take_half_the_bytes():
    nibbles = pack_nibbles(torch.zeros(3, 8, dtype=torch.uint8))
    assert (nibbles.dtype, nibbles.shape) == (torch.uint8, (3, 4)), "two codes to a byte of torch.uint8"


def test_an_odd_number_of_codes_leaves_half_a_byte_empty():
    nibbles = pack_nibbles(torch.tensor([[1, 2, 3]], dtype=torch.uint8))
    assert nibbles.tolist() == [[1 + 16 * 2, 3]], "the last byte's upper half is 0"
    assert unpack_nibbles(nibbles, 3).tolist() == [[1, 2, 3]], "K says how many codes there are"


def test_all_pairs_come_back():
    pairs = torch.cartesian_prod(torch.arange(16), torch.arange(16)).to(torch.uint8)  # [256, 2]
    nibbles = pack_nibbles(pairs)
    assert len(set(nibbles.flatten().tolist())) == 256, "each pair has a byte of its own"
    assert torch.equal(unpack_nibbles(nibbles, 2), pairs), "what was packed comes back"


@pytest.mark.parametrize("K", [1, 2, 7, 64, 129])
def test_rows_do_not_mix(K):
    codes = torch.randint(0, 16, (5, K), generator=torch.Generator().manual_seed(K), dtype=torch.uint8)
    assert torch.equal(unpack_nibbles(pack_nibbles(codes), K), codes), "each row is packed by itself"
