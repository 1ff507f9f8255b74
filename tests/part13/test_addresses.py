"""What the interpreter cannot show: how wide the numbers of an address are, and how exact a product is.

The kernels are compiled for a GPU, and what Triton makes of them first is read (its TTIR).
"""

import re
import tempfile
from functools import cache
from pathlib import Path

import pytest

from tests.part13.compiling import compiled

pytest.importorskip("triton", reason="needs the package triton")

LOAD = re.compile(r"(%\w+) = tt\.load .*: (?:tensor<\w+x)?!tt\.ptr<i32>")


@cache
def intermediate(kernel: str) -> str:
    """The kernel's TTIR."""
    with tempfile.TemporaryDirectory() as folder:
        assert compiled("tests.part13.compiled", Path(folder), kernel) == {kernel}
        (path,) = (Path(folder) / "cache").rglob(f"{kernel}.ttir")
        return path.read_text()


@pytest.mark.parametrize(("kernel", "what"), [("_store", "a slot"), ("_attend", "a block")])
def test_a_number_that_finds_a_place_has_64_bits_before_it_is_multiplied(kernel, what):
    text = intermediate(kernel)
    loaded = LOAD.findall(text)
    assert loaded, f"{kernel} loads {what} as a number of 32 bits"
    products = [line for line in text.splitlines() if "arith.muli" in line]
    narrow = [name for name in loaded for line in products if re.search(rf"{name}\b", line.partition("=")[2])]
    assert not narrow, (
        f"{what} becomes a number of 64 bits, `.to(tl.int64)`, then it is multiplied: a memory has more than "
        "2^31 numbers"
    )


def test_products_are_exact():
    assert "tf32" not in intermediate("_attend"), (
        'products take input_precision="ieee": the default, tf32, drops 13 of 23 bits behind the point'
    )
