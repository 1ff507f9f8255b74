"""How much smaller do whole numbers make a model, and how much worse?

    python -m benchmarks.part17_perplexity [--characters 60000]

storyteller on held-out stories, in pieces of 256 tokens, each a forward pass of its own. Bytes are those
of the checkpoint that `save_quantized` writes; fp16 is the embedded checkpoint as it is. `worse` is a mean
over the pieces, `error` its standard error: the same pieces, so what makes one harder than another falls
out. Needs stories_val.txt of the folder of texts.
"""

import argparse
import math
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.record import DATA, corpus, record
from engine.attention.interface import Spans
from engine.models.checkpoint import ZOO
from engine.models.loader import load_model
from engine.quantization import codes
from engine.quantization.checkpoint import save_quantized
from engine.quantization.quantize import model_bytes, pack_quantized, quantize
from engine.text.tokenizer import Tokenizer
from engine.wiring.attention_kernel import attention_kernel

MODEL, PIECE = "storyteller", 256
WAYS: dict[str, dict[str, Any]] = {
    "int8": {"method": "int8"},
    "int8_dynamic": {"method": "int8_dynamic"},
    "int4, groups of 32": {"method": "int4", "group_size": 32},
    "int4": {"method": "int4", "group_size": 64},
    "int4, groups of 128": {"method": "int4", "group_size": 128},
    "int4, whole ranges": {"method": "int4", "group_size": 64, "shares": (1.0,)},
}


@torch.inference_mode()
def losses(model: nn.Module, pieces: list[list[int]]) -> Tensor:
    """[pieces]: the mean loss per token of each; all are of one length."""
    kernel = attention_kernel("sdpa", model.config.head_dim, torch.device("cpu"), torch.float32)
    found = []
    for ids in pieces:
        spans = Spans.of_one(len(ids), len(ids))
        attend = lambda layer, q, k, v, spans=spans: kernel(q, k, v, spans)  # noqa: E731
        scores = model.logits(model(torch.tensor(ids), torch.arange(len(ids)), attend))[:-1].log_softmax(1)
        found.append(-scores[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].mean())
    return torch.stack(found).double()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--characters", type=int, default=60_000, help="of held-out text")
    options = parser.parse_args()
    text = corpus(DATA / "stories_val.txt")[: options.characters]
    ids = Tokenizer.from_pretrained(MODEL).encode(text)
    pieces = [ids[start : start + PIECE] for start in range(0, len(ids) - PIECE + 1, PIECE)]
    plain = load_model(MODEL)
    size, before = model_bytes(plain), losses(plain, pieces)
    base = math.exp(before.mean())
    half = (ZOO / MODEL / "model.safetensors").stat().st_size
    rows = [
        ["fp32", size / 1e6, 1.0, base, 0.0, 0.0],
        ["fp16, as it was saved", half / 1e6, half / size, base, 0.0, 0.0],
    ]
    figures = {"fp32": {"bytes": size, "perplexity": base, "share": 1.0, "worse": 0.0}}
    for name, way in WAYS.items():
        settings = {key: value for key, value in way.items() if key != "shares"}
        every = codes.RANGE_SHARES
        codes.RANGE_SHARES = way.get("shares", every)
        model = load_model(MODEL, transform=partial(quantize, **settings))
        codes.RANGE_SHARES = every
        with tempfile.TemporaryDirectory() as folder:
            written = (save_quantized(model, MODEL, Path(folder) / "q") / "model.safetensors").stat().st_size
        change = losses(pack_quantized(model), pieces) - before  # [pieces]
        worse, error = math.expm1(change.mean()), float(change.std()) / math.sqrt(len(pieces))
        memory = model_bytes(model)
        rows.append([name, written / 1e6, written / size, base * (1 + worse), 100 * worse, 100 * error])
        key = name.replace(", groups of ", "_").replace(", whole ranges", "_whole")
        figures[key] = {
            "bytes": written, "share": written / size, "in_memory": memory / size,
            "perplexity": base * (1 + worse), "worse": worse, "error": error,
        }  # fmt: skip
        print(rows[-1], f"in memory {memory / size:.3f}", flush=True)
    columns = ["weights", "MB", "of fp32", "perplexity", "worse by %", "± %"]
    record(
        "part17_perplexity",
        "How much smaller do whole numbers make a model, and how much worse?",
        {
            "model": MODEL,
            "text": "stories_val.txt",
            "tokens": PIECE * len(pieces),
            "piece": PIECE,
            "pieces": len(pieces),
        },
        figures,
        {"ways": {"columns": columns, "rows": rows}},
    )


if __name__ == "__main__":
    main()
