"""How well do the base and its two adapters predict texts that none of them has seen?

    python -m tools.evaluate_adapters [--data ../shared/data]

Perplexity: exp of the mean loss of a token, over whole documents. 14 sonnets and 40 letters that training and
its choices left aside (tools/train_adapters.py deals them out), and the first 40 stories of the validation
text. Writes benchmarks/results/adapters.json.
"""

import argparse
import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.part18_engines import ADAPTERS, MODEL, ROOT
from benchmarks.record import record, show
from engine.attention.dense import causal
from engine.lora.adapter import read_adapter
from engine.lora.slots import AdapterSlots
from engine.models.config import ModelConfig
from engine.models.loader import load_model
from engine.requests.batch import NO_ADAPTER
from engine.text.tokenizer import Tokenizer
from tools.train_adapters import dealt


@torch.inference_mode()
def perplexity(model, tokenizer: Tokenizer, texts: list[str], slots: AdapterSlots, slot: int) -> float:
    """Over documents that begin and end with <|endoftext|>; of each at most the model's positions."""
    nats, count = 0.0, 0
    for text in texts:
        ids = torch.tensor([0, *tokenizer.encode(text), 0][: model.config.max_positions])
        T = len(ids) - 1
        slots.rows.fill([slot], [0, T])
        logits = model.logits(model(ids[:-1], torch.arange(T), causal))
        nats += torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum").item()
        count += T
    return math.exp(nats / count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    options = parser.parse_args()
    torch.set_num_threads(1)
    slots = AdapterSlots(2, 8, 1024)
    model, tokenizer = load_model(MODEL, transform=slots.wrap), Tokenizer.from_pretrained(MODEL)
    slot_of = {"base": NO_ADAPTER, "poetry": 0, "business": 1}
    for name in ("poetry", "business"):
        slots.write(slot_of[name], read_adapter(ADAPTERS / name, ModelConfig.from_pretrained(MODEL)))
    stories = (options.data / "stories_val.txt").read_text().split("\n\n")
    texts = {
        "sonnets": [text for _, text in dealt("poetry", options.data / "sonnets_pg.txt")["test"]],
        "letters": [text for _, text in dealt("business", None)["test"]],
        "stories": [story for story in stories if len(story) > 200][:40],
    }
    found = {
        what: {side: perplexity(model, tokenizer, own, slots, slot) for side, slot in slot_of.items()}
        for what, own in texts.items()
    }
    rows = [[what, len(texts[what]), *(round(found[what][side], 1) for side in slot_of)] for what in texts]
    figures = {
        what: {side: round(100 * (value / found[what]["base"] - 1), 1) for side, value in own.items()}
        for what, own in found.items()
    }
    columns = ["held-out texts", "how many", *slot_of]
    tables: dict[str, dict[str, list]] = {"perplexity": {"columns": columns, "rows": rows}}
    path = record("adapters", __doc__.splitlines()[0], {"model": MODEL, "rank": 8}, figures, tables)
    show(path, tables)


if __name__ == "__main__":
    main()
