"""At how many bits does a model break, with a scale for a row or for a group, above a low or centred?

    python -m benchmarks.part17_bits [--characters 60000]

storyteller on held-out stories, as part17_perplexity has it. Only the weights of linear layers are rounded;
embedding and output layer stay in fp32. Numbers of a group are kept in fp16. Centred codes go from −c to c
with c = 2^(bits − 1) − 1, and take a scale alone. A perplexity is no time: a busy machine gives the same.
Needs stories_val.txt of the folder of texts.
"""

import argparse
import math
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.part17_perplexity import MODEL, PIECE, losses
from benchmarks.record import DATA, corpus, record
from engine.layers.replace import linear_names
from engine.models.loader import load_model
from engine.quantization.codes import RANGE_SHARES
from engine.text.tokenizer import Tokenizer

BITS = (8, 6, 5, 4, 3, 2)
GROUP = 64


class Side(NamedTuple):
    """A way to make codes of weights."""

    label: str
    group_size: int | None  # None: a row
    centred: bool
    shares: tuple[float, ...] = (1.0,)  # of the range that are tried


SIDES = {
    "low_row": Side("above a low, by row", None, False),
    "low_group": Side("above a low, by group", GROUP, False),
    "centred_row": Side("centred, by row", None, True),
    "centred_group": Side("centred, by group", GROUP, True),
}
NARROWED = {
    "low_group_narrowed": Side("above a low, by group, narrowed", GROUP, False, RANGE_SHARES),
    "centred_group_narrowed": Side("centred, by group, narrowed", GROUP, True, RANGE_SHARES),
}


def rounded(weight: Tensor, bits: int, side: Side) -> Tensor:
    """weight[N, K] -> [N, K]: what its codes stand for. Of several shares each group keeps the best."""
    N, K = weight.shape
    groups = weight.view(N, -1, side.group_size or K)  # [N, groups, group_size]
    smallest, largest = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    best, best_error = groups, torch.full_like(smallest, math.inf)
    for share in side.shares:
        if side.centred:
            end = 2 ** (bits - 1) - 1
            low, first, last = torch.zeros_like(smallest), -end, end
            scale = torch.maximum(-smallest, largest) * share / end
        else:
            half = (largest - smallest) / 2 * share
            low, first, last = (smallest + largest) / 2 - half, 0, 2**bits - 1
            scale = 2 * half / last
        scale, low = scale.half().float(), low.half().float()
        codes = ((groups - low) / scale.clamp(min=1e-12)).round().clamp(first, last)
        back = low + codes * scale
        error = (back - groups).square().sum(2, keepdim=True)
        best = torch.where(error < best_error, back, best)
        best_error = torch.minimum(error, best_error)
    return best.view(N, K)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--characters", type=int, default=60_000, help="of held-out text")
    options = parser.parse_args()
    text = corpus(DATA / "stories_val.txt")[: options.characters]
    ids = Tokenizer.from_pretrained(MODEL).encode(text)
    pieces = [ids[start : start + PIECE] for start in range(0, len(ids) - PIECE + 1, PIECE)]
    plain = load_model(MODEL)
    before = losses(plain, pieces)
    base = math.exp(before.mean())
    layers = [name for name in linear_names(plain) if name != "head"]
    num_weights = sum(plain.get_submodule(name).weight.numel() for name in layers)
    rows, figures = [], {"fp32": {"perplexity": base}}
    for sides, all_bits in ((SIDES, BITS), (NARROWED, (4, 3))):
        for name, side in sides.items():
            for bits in all_bits:
                model, num_groups = load_model(MODEL), 0
                for layer in layers:
                    weight = model.get_submodule(layer).weight
                    weight.data = rounded(weight.data, bits, side)
                    num_groups += weight.numel() // (side.group_size or weight.shape[1])
                change = losses(model, pieces) - before  # [pieces]
                worse, error = math.expm1(change.mean()), float(change.std()) / math.sqrt(len(pieces))
                numbers = 1 if side.centred else 2  # that a group keeps, of 16 bits each
                kept = bits + 16 * numbers * num_groups / num_weights
                figures[f"{name}_{bits}"] = {
                    "perplexity": base * (1 + worse), "worse": worse, "error": error, "kept": kept,
                }  # fmt: skip
                rows.append([side.label, bits, kept, base * (1 + worse), 100 * worse, 100 * error])
                print(rows[-1], flush=True)
    columns = ["codes", "bits", "bits with scales", "perplexity", "worse by %", "± %"]
    workload = {
        "model": MODEL, "text": "stories_val.txt", "tokens": PIECE * len(pieces), "piece": PIECE,
        "pieces": len(pieces), "group": GROUP,
    }  # fmt: skip
    fours = [row for row in rows if row[1] == 4]
    tables = {
        "all": {"columns": columns, "rows": rows},
        "four": {"columns": [*columns[:1], *columns[2:]], "rows": [[row[0], *row[2:]] for row in fours]},
    }
    record("part17_bits", "At how many bits does a model break?", workload, figures, tables)


if __name__ == "__main__":
    main()
