"""Measure storyteller-llama beside storyteller, by the protocol of tools/evaluate_models.py: how well each
predicts, and how often it does what it is asked. Writes `benchmarks/results/embedded_llama.json` and the
card's table.

    python -m tools.evaluate_llama --val ../shared/data/stories_val.txt

Weights as they lie on disk (fp16), computed in fp32 by Hugging Face. Takes minutes on a CPU.
"""

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from benchmarks.record import record
from tools.evaluate_models import TEST_CHARACTERS, ZOO, answers, prediction
from tools.render_tables import render

NAMES = ("storyteller", "storyteller-llama")
COLUMNS = ("model", "million parameters", "bits per character", "hold both nouns", "end by themselves")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--val", type=Path, default=Path("../shared/data/stories_val.txt"))
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    tokenizer = Tokenizer.from_file(str(ZOO / NAMES[0] / "tokenizer.json"))
    ids = tokenizer.encode(a.val.read_text()[:TEST_CHARACTERS]).ids
    figures, rows = {}, []
    for name in NAMES:
        model = AutoModelForCausalLM.from_pretrained(ZOO / name, dtype=torch.float32).eval()
        found = prediction(model, ids) | answers(model, tokenizer, a.requests)
        found |= {"parameters": model.num_parameters()}
        figures[name] = found
        millions = round(found["parameters"] / 1e6, 2)
        bits, both, ended = (
            found[key] for key in ("bits_per_character", "contain_both", "end_by_themselves")
        )
        rows.append([name, millions, bits, both, ended])
        print(dict(zip(COLUMNS, rows[-1], strict=True)), flush=True)
    record(
        "embedded_llama",
        "How well does storyteller-llama predict, and do what it is asked, beside storyteller?",
        {"text": f"{a.val.name}[:{TEST_CHARACTERS}]", "requests": a.requests, "torch_threads": a.threads},
        figures,
        {"models": {"columns": list(COLUMNS), "rows": rows}},
    )
    card = ZOO / NAMES[1] / "README.md"
    card.write_text(render(card.read_text()))


if __name__ == "__main__":
    main()
