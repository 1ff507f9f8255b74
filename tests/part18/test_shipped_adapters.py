"""The two adapters that come with this part: each makes its own kind of text likelier, and no other."""

import math
from pathlib import Path

import pytest
import torch

from engine.attention.dense import causal
from engine.lora.adapter import read_adapter
from engine.lora.slots import AdapterSlots
from engine.models.config import ModelConfig
from engine.models.loader import load_model
from engine.requests.batch import NO_ADAPTER
from engine.text.tokenizer import Tokenizer

ADAPTERS = Path(__file__).parents[2] / "adapters"
# Milton's: no sonnet of his was in the training.
POEM = """When I consider how my light is spent,
Ere half my days, in this dark world and wide,
And that one talent which is death to hide
Lodged with me useless, though my soul more bent
To serve therewith my Maker, and present
My true account, lest he returning chide;"""
LETTER = """Dear Ms. Wright,

Thank you for your letter of May 30. We are pleased to confirm your order of 85 desk lamps and 40 chairs.

Please contact our office if you have any questions about the delivery.

Sincerely,
Martha Olsen"""
TEXTS = {"poetry": POEM, "business": LETTER}


@pytest.fixture(scope="module")
def perplexity():
    """perplexity(adapter or None, text)"""
    slots = AdapterSlots(2, 8, 512)
    model, tokenizer = (
        load_model("storyteller", transform=slots.wrap),
        Tokenizer.from_pretrained("storyteller"),
    )
    slot_of = {None: NO_ADAPTER, "poetry": 0, "business": 1}
    for name in TEXTS:
        slots.write(slot_of[name], read_adapter(ADAPTERS / name, model.config))

    @torch.inference_mode()
    def measure(adapter: str | None, text: str) -> float:
        ids = torch.tensor([0, *tokenizer.encode(text)])
        slots.rows.fill([slot_of[adapter]], [0, len(ids) - 1])
        logits = model.logits(model(ids[:-1], torch.arange(len(ids) - 1), causal))
        return math.exp(torch.nn.functional.cross_entropy(logits, ids[1:]).item())

    return measure


@pytest.mark.parametrize(("own", "other"), [("poetry", "business"), ("business", "poetry")])
def test_a_text_of_its_kind_is_likelier_under_its_adapter_and_not_under_the_other(perplexity, own, other):
    base = perplexity(None, TEXTS[own])
    assert perplexity(own, TEXTS[own]) < 0.7 * base, "at least 30% lower"
    assert perplexity(other, TEXTS[own]) > 0.7 * base, "and not under the other"


@pytest.mark.parametrize("name", TEXTS)
def test_they_are_small_and_name_no_path(name):
    config = ModelConfig.from_pretrained("storyteller")
    assert read_adapter(ADAPTERS / name, config).rank == 8
    size = sum(file.stat().st_size for file in (ADAPTERS / name).iterdir())
    assert size < 500_000
    assert '"base_model_name_or_path": "storyteller"' in (ADAPTERS / name / "adapter_config.json").read_text()
