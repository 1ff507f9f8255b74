"""Our model beside Hugging Face's, for any checkpoint: the same logits, the same tokens?

    python -m tools.compare_models CHECKPOINT [--device cuda] [--tokens 128] [--out FOLDER]

CHECKPOINT is an embedded name, a folder or a hub id. Per dtype: the largest difference between our logits and
Hugging Face's, beside that between Hugging Face's own two ways to attend (eager and SDPA); how many rows have
the same five likeliest tokens, in order (and of their two ways), and the same likeliest one; and how many
greedy tokens are the same until the first that is not. If fp32 differs, a line names the first layer, and the
part of it, that does. The rows are those of random token ids, and greedy
tokens follow their first eight. In half precision rounding decides close races: nothing need be equal there.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.record import OUT, record, show
from engine.attention.dense import causal
from engine.attention.interface import Attend
from engine.models.checkpoint import CheckpointError, resolve
from engine.models.config import ModelConfig
from engine.models.loader import load_model
from engine.wiring.extensions import wiring_of
from tools.first_difference import first_difference

DTYPES = ("float32", "bfloat16", "float16")
BOUND = 2.3e-5  # in fp32, where Hugging Face's two ways differ by less; else twice their difference
PROMPT = 8
COLUMNS = ["dtype", "difference", "HF's own", "allowed", "top 5", "HF's own", "top 1", "greedy"]


def attend_of(model) -> Attend:
    """What our model attends with, without a memory."""
    return wiring_of("C").causal if model.config.attention_extras else causal


@torch.inference_mode()
def our_logits(model, token_ids: Tensor) -> Tensor:
    """token_ids[T] -> [T, V]"""
    positions = torch.arange(len(token_ids), device=token_ids.device)
    return model.logits(model(token_ids, positions, attend_of(model))).float()


@torch.inference_mode()
def their_logits(model: PreTrainedModel, token_ids: Tensor, attention: str) -> Tensor:
    """token_ids[T] -> [T, V]"""
    model.set_attn_implementation(attention)
    return model(token_ids[None]).logits[0].float()


def greedy(model, token_ids: Tensor, tokens: int) -> list[int]:
    """The likeliest token, again and again, everything computed anew each time."""
    ids = token_ids.tolist()
    for _ in range(tokens):
        ids.append(int(our_logits(model, torch.tensor(ids, device=token_ids.device))[-1].argmax()))
    return ids[len(token_ids) :]


def their_greedy(model: PreTrainedModel, token_ids: Tensor, tokens: int) -> list[int]:
    model.generation_config.eos_token_id = None
    ids, options = token_ids[None], {"do_sample": False, "max_new_tokens": tokens, "pad_token_id": 0}
    told = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return told[0, len(token_ids) :].tolist()


def compare(checkpoint: str, dtype: str, device: str, tokens: int) -> dict:
    """What one dtype shows."""
    folder = resolve(checkpoint, weights=True)
    ours = load_model(folder, device, dtype)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device).eval()
    generator = torch.Generator().manual_seed(0)
    vocab_size = ModelConfig.from_pretrained(folder).vocab_size
    ids = torch.randint(vocab_size, (tokens,), generator=generator).to(device)
    mine, eager = our_logits(ours, ids), their_logits(theirs, ids, "eager")
    sdpa = their_logits(theirs, ids, "sdpa")
    spread = float((eager - sdpa).abs().max())
    top5 = [logits.topk(5).indices for logits in (mine, sdpa, eager)]  # [T, 5] each
    same, own = top5[0] == top5[1], top5[2] == top5[1]
    told, want = greedy(ours, ids[:PROMPT], tokens // 4), their_greedy(theirs, ids[:PROMPT], tokens // 4)
    agreed = next((i for i, (a, b) in enumerate(zip(told, want, strict=True)) if a != b), len(want))
    difference = float((mine - sdpa).abs().max())
    allowed = (BOUND if spread < BOUND else 2 * spread) if dtype == "float32" else None
    where = None
    if allowed is not None and difference > allowed:
        where = first_difference(ours, theirs, ids, attend_of(ours))
    return {
        "max_difference": difference,
        "hf_eager_to_sdpa": spread,
        "allowed": allowed,
        "first_difference": where,
        "same_top5": float(same.all(1).float().mean()),
        "hf_same_top5": float(own.all(1).float().mean()),
        "same_top1": float(same[:, 0].float().mean()),
        "greedy_same": agreed,
        "greedy_of": len(want),
    }


def row(dtype: str, found: dict) -> list:
    shares = [f"{found[name]:.1%}" for name in ("same_top5", "hf_same_top5", "same_top1")]
    allowed = "" if found["allowed"] is None else found["allowed"]
    numbers = found["max_difference"], found["hf_eager_to_sdpa"], allowed
    return [dtype, *numbers, *shares, f"{found['greedy_same']} of {found['greedy_of']}"]


def is_equal(found: dict) -> bool:
    """Of fp32: as close as Hugging Face's two ways are, and the same tokens."""
    close = found["max_difference"] <= found["allowed"]
    return close and found["same_top5"] == 1 and found["greedy_same"] == found["greedy_of"]


def main(arguments: list[str] | None = None) -> int:
    """0: equal in fp32; 1: not, or there is no such checkpoint, which is said in a line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    try:
        found = {
            dtype: compare(options.checkpoint, dtype, options.device, options.tokens)
            for dtype in options.dtypes
        }
    except CheckpointError as error:
        raise SystemExit(f"compare_models: {error}") from None
    title = f"{options.checkpoint} on {options.device}: ours and Hugging Face's, {options.tokens} tokens"
    rows = [row(dtype, figures) for dtype, figures in found.items()]
    tables: dict[str, dict[str, list]] = {title: {"columns": COLUMNS, "rows": rows}}
    workload = {
        "checkpoint": options.checkpoint,
        "device": options.device,
        "tokens": options.tokens,
        "seed": 0,
    }
    name = f"compare_{Path(options.checkpoint).name}"
    path = record(name, "Are the numbers Hugging Face's?", workload, found, tables, folder=options.out)
    show(path, tables)
    for figures in found.values():
        if figures["first_difference"]:
            print(f"The first that differs: {figures['first_difference']}")
    return 0 if all(is_equal(one) for dtype, one in found.items() if dtype == "float32") else 1


if __name__ == "__main__":
    raise SystemExit(main())
