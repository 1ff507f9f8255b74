"""Are the numbers of GPT-2, Llama and Qwen3 Hugging Face's, in fp32, bf16 and fp16?

    python -m benchmarks.part20_hugging_face

The embedded storyteller (GPT-2), and a small Llama and a small Qwen3 with random weights, through
`tools/compare_models.py`: 128 rows of random token ids, and 32 greedy tokens. Beside it, how far both sides'
logits of a dtype are from Hugging Face's in fp32, in the mean: who is nearer to what was to be computed?
"""

import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from benchmarks.part20_models import FAMILIES, READER, reader
from benchmarks.record import record, show
from engine.models.checkpoint import resolve
from engine.models.loader import load_model
from tools.compare_models import DTYPES, compare, our_logits, their_logits

TOKENS = 128
COLUMNS = ["model", "dtype", "difference", "HF's own", "same top 5", "HF's own", "same greedy tokens"]


def row(name: str, dtype: str, one: dict) -> list:
    """Our difference from Hugging Face beside that between its own two ways to attend; shares of rows."""
    shares = [f"{one[share]:.0%}" for share in ("same_top5", "hf_same_top5")]
    differences = one["max_difference"], one["hf_eager_to_sdpa"]
    return [
        name,
        dtype,
        differences[0],
        differences[1],
        *shares,
        f"{one['greedy_same']} of {one['greedy_of']}",
    ]


def from_fp32(checkpoint: str, dtype: str) -> dict[str, float]:
    """Mean difference of a logit from Hugging Face's in fp32."""
    folder = resolve(checkpoint)
    ids = torch.randint(0, READER["vocab_size"], (TOKENS,), generator=torch.Generator().manual_seed(0))
    exact, rounded = (
        their_logits(AutoModelForCausalLM.from_pretrained(folder, dtype=kind).eval(), ids, "sdpa")
        for kind in (torch.float32, getattr(torch, dtype))
    )
    ours = our_logits(load_model(folder, dtype=dtype), ids)
    return {
        "mean_from_fp32": float((ours - exact).abs().mean()),
        "hf_mean_from_fp32": float((rounded - exact).abs().mean()),
    }


def main() -> None:
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as place:
        checkpoints = {"storyteller": "storyteller"}
        for family in FAMILIES:
            checkpoints[family] = str(Path(place) / family)
            reader(family, Path(place) / family)
        found = {
            name: {
                dtype: compare(checkpoint, dtype, "cpu", TOKENS) | from_fp32(checkpoint, dtype)
                for dtype in DTYPES
            }
            for name, checkpoint in checkpoints.items()
        }
    rows = [row(name, dtype, one) for name, dtypes in found.items() for dtype, one in dtypes.items()]
    tables = {"compared": {"columns": COLUMNS, "rows": rows}}
    workload = {"models": list(checkpoints), "tokens": TOKENS, "seed": 0}
    show(record("part20_hugging_face", __doc__.splitlines()[0], workload, found, tables), tables)


if __name__ == "__main__":
    main()
