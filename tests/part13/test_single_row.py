"""The chain for one row gives the logits of the model's own forward pass, and stores the same keys."""

import pytest
import torch

pytest.importorskip("triton", reason="needs the package triton")

from engine.attention.paged import Gathered, Pages
from engine.kernels.single_row import SingleRow
from engine.models.loader import load_model
from tests.part01.reference import random_gpt2, save
from tests.part13.test_paged_attention import DEVICE, P

LAYERS, WIDTH, HEADS = 2, 32, 2


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    theirs = random_gpt2(vocab_size=67, n_positions=256, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS)
    folder = save(theirs, tmp_path_factory.mktemp("gpt2"))
    return load_model(folder, DEVICE, "float32")


def test_logits_and_stored_keys_are_the_models(model, wide_tiles):
    """Two sequences, one after the other, over the same buffers: nothing is left behind by the first."""
    generator = torch.Generator().manual_seed(17)
    B, Dh = 16, WIDTH // HEADS
    memory = torch.randn(2, LAYERS, B, P, HEADS, Dh, generator=generator).to(DEVICE)
    mine = memory.clone()
    step = SingleRow(model, list(mine[0]), list(mine[1]))
    for length in (130, 17):
        table = torch.randperm(B, generator=generator)[: -(-length // P)].numpy()
        pages = Pages.of([table], [length], P)
        slot = int(table[(length - 1) // P]) * P + (length - 1) % P
        token, position, slots = (torch.tensor([x], device=DEVICE) for x in (7, length - 1, slot))

        def attend(layer, q, k, v, pages=pages, slot=slot):
            for x, rows in zip(memory[:, layer], (k, v), strict=True):
                x.flatten(0, 1)[slot] = rows[0]
            return Gathered(pages, HEADS, memory[0, layer])(q, *memory[:, layer])

        with torch.inference_mode():
            want = model.logits(model(token, position, attend))
            got = step(token, position, slots, *pages.on(torch.device(DEVICE)))
        assert torch.allclose(got, want, atol=2e-4), f"the chain's logits are the model's, at {length} tokens"
        assert torch.allclose(mine, memory, atol=1e-5), "the new token's keys and values lie in its slot"
