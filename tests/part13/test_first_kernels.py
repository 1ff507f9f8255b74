"""The kernels with which the article begins give what gathering gives, as the finished one does."""

from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="needs the package triton")

from benchmarks.part13_steps import one_pass, tiles, two_passes
from engine.attention.paged import Gathered
from tests.part13.test_paged_attention import DEVICE, scattered


@pytest.mark.parametrize("kernel", [two_passes, one_pass, tiles, partial(tiles, tokens=4)])
@pytest.mark.parametrize(("Hq", "Hkv", "Dh"), [(2, 2, 16), (2, 1, 24)])
def test_a_step_on_the_way_is_right(kernel, Hq, Hkv, Dh):
    pages, keys, values, generator = scattered([1, 18], Hkv, Dh)
    q = torch.randn(2, Hq, Dh, generator=generator).to(DEVICE)
    got = kernel(q, keys, values, *pages.on(keys.device))
    assert torch.allclose(got, Gathered(pages, Hq, keys)(q, keys, values), atol=1e-5), "as gathering gives"
