"""Measure the two embedded models: how well they predict, whether storyteller does what it is asked, whether
its draft pays. Prints everything, writes `benchmarks/results/embedded_models.json` and the cards' tables.

    python -m tools.evaluate_models --val ../shared/data/stories_val.txt

Promises one protocol for both models, and the weights as they lie on disk (fp16), computed in fp32. Takes
minutes on a CPU. Knows nothing of training but the nouns and which pairs of them no training request held.
"""

import argparse
import itertools
import json
import math
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import GPT2LMHeadModel

from benchmarks.record import record
from engine.cache.single import CachedForward
from engine.layers.packed_linear import pack_linears
from engine.models.loader import load_model
from tools.render_tables import render
from tools.storyteller_texts import ASSISTANT, NOUNS, USER, contains, held_out, phrase
from tools.train_storyteller import tell, window_losses

ZOO = Path(__file__).parent.parent / "engine" / "zoo"
NAMES = ("storyteller", "storyteller-draft")
TEST_CHARACTERS = 200_000  # training decisions were made on what comes after them
BUCKETS = [(1, 8), (9, 32), (33, 128), (129, 256), (257, 512), (513, 768), (769, 1023)]
SHAPES = [(6, 256), (8, 256), (4, 320), (5, 320), (3, 384)]  # layers, width: what fits in 16 MB
SAMPLES = [  # prompt, seed, temperature
    ("Once upon a time", 0, 0.7),
    (f"{USER}Tell me a story about a dog and a red ball{ASSISTANT}", 0, 0.7),
    (f"{USER}Tell me a long story about a girl named Lily{ASSISTANT}", 2, 0.3),
]


def prediction(model: GPT2LMHeadModel, ids: list[int]) -> dict:
    """Bits per character and loss by position, in windows of EOS and 1,023 tokens of text without overlap."""
    losses = window_losses(model, ids)  # [windows, 1023] in nats, NaN behind the end
    by_position = {f"{a}-{b}": round(losses[:, a - 1 : b].nanmean().item(), 4) for a, b in BUCKETS}
    return {
        "bits_per_character": round(losses.nansum().item() / math.log(2) / TEST_CHARACTERS, 4),
        "nats_per_token": round(losses.nanmean().item(), 4),
        "nats_per_token_by_position": by_position,
        "tokens": len(ids),
    }


def requests(count: int, seed: int) -> list[tuple[str, str]]:
    """`count` different pairs of nouns, drawn from those that no training request named together."""
    pairs = [pair for pair in itertools.combinations(NOUNS, 2) if held_out(*pair)]
    return random.Random(seed).sample(pairs, count)


def answers(model: GPT2LMHeadModel, tokenizer: Tokenizer, count: int) -> dict:
    """How many of `count` requests for two nouns are answered with both of them, and end by themselves."""
    pairs = requests(count, 0)
    texts = [f"Tell me a story about {phrase(a)} and {phrase(b)}" for a, b in pairs]
    told = tell(model, tokenizer, [f"{USER}{text}{ASSISTANT}" for text in texts], 0.7, 400, 0)
    both = [contains(text, a) and contains(text, b) for (text, _, _), (a, b) in zip(told, pairs, strict=True)]
    shown = list(zip(texts, told, both, strict=True))[:5]
    return {
        "requests": count,
        "contain_both": sum(both),
        "end_by_themselves": sum(ended for _, _, ended in told),
        "median_tokens": statistics.median(length for _, length, _ in told),
        "first": [{"request": text, "story": t, "both": ok} for text, (t, _, _), ok in shown],
    }


@torch.inference_mode()
def agreement(target: GPT2LMHeadModel, draft: GPT2LMHeadModel, ids: list[int]) -> float:
    """Share of positions at which both models' likeliest next token is the same, given the same real text."""
    rows = [[0, *ids[i : i + 1023]] for i in range(0, len(ids) - 1023, 1023)]
    same = []
    for chunk in torch.tensor(rows).split(8):
        same.append(target(input_ids=chunk).logits.argmax(-1) == draft(input_ids=chunk).logits.argmax(-1))
    return torch.cat(same).float().mean().item()


def step_times(models: dict, packed: bool, ids: list[int], rounds: int = 6) -> dict[str, float]:
    """Median milliseconds of a cached decode step of our engine, batch 1. Each model decodes by itself, as
    drafts do; they take turns by rounds, so that whatever else the machine does falls on all."""
    if packed:
        models = {name: pack_linears(model) for name, model in models.items()}
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds):
        for name, model in models.items():
            forward = CachedForward(model)
            forward(ids[:64])
            for length in range(65, 320):
                began = time.perf_counter()
                int(forward(ids[:length]).argmax())
                times[name].append(1e3 * (time.perf_counter() - began))
    return {name: round(statistics.median(values), 4) for name, values in times.items()}


def shape_times(ids: list[int]) -> list[list]:
    """What a step costs in other shapes: [layers x width, million parameters, ms, ms with packed weights]."""
    raw = json.loads((ZOO / "storyteller" / "config.json").read_text())
    rows: dict[str, list] = {}
    for packed in (False, True):
        models = {}
        for layers, width in SHAPES:
            with tempfile.TemporaryDirectory() as folder:
                config = raw | {"n_layer": layers, "n_embd": width, "n_head": width // 64}
                Path(folder, "config.json").write_text(json.dumps(config))
                model = load_model(folder, load_format="dummy")
            models[f"{layers} x {width}"] = model.half().float()  # as a checkpoint in fp16 leaves them
        sizes = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
        for name, milliseconds in step_times(models, packed, ids).items():
            rows.setdefault(name, [name, round(sizes[name] / 1e6, 2)]).append(milliseconds)
    return list(rows.values())


def gain(alpha: float, c: float, k: int) -> float:
    """Speed-up when k tokens are drafted at a time (Leviathan et al., ICML 2023, theorem 3.8)."""
    return (1 - alpha ** (k + 1)) / ((1 - alpha) * (1 + k * c))


def draft_pays(alpha: float, times: dict[str, float]) -> dict:
    """What drafting buys at the best k, given the agreement and both models' times."""
    c = times["storyteller-draft"] / times["storyteller"]
    k = max(range(1, 17), key=lambda k: gain(alpha, c, k))
    return {
        "milliseconds_per_step": times,
        "c": round(c, 4),
        "best_k": k,
        "gain": round(gain(alpha, c, k), 3),
    }


def sample(prompt: str, seed: int, temperature: float, limit: int = 1000) -> dict:
    """One text told by our engine, batch 1, drawn from the whole distribution."""
    tokenizer = Tokenizer.from_file(str(ZOO / "storyteller" / "tokenizer.json"))
    forward, ids = CachedForward(load_model("storyteller")), tokenizer.encode(prompt).ids
    generator, start = torch.Generator().manual_seed(seed), len(ids)
    while len(ids) < min(start + limit, 1024) and ids[-1] != 0:
        probabilities = (forward(ids) / temperature).softmax(-1)
        ids.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    ended = ids[-1] == 0
    told = ids[start : len(ids) - ended]
    setting = {"prompt": prompt, "seed": seed, "temperature": temperature}
    return setting | {"tokens": len(told), "ended": ended, "text": tokenizer.decode(told)}


def tables(figures: dict) -> dict:
    """What the model cards show."""
    buckets = [figures[name]["nats_per_token_by_position"] for name in NAMES]
    pays = [(kind, figures["draft"][kind]) for kind in ("plain", "packed")]
    return {
        "positions": {
            "columns": ["position of the predicted token", *(f"{name}, nats per token" for name in NAMES)],
            "rows": [[key, *(bucket[key] for bucket in buckets)] for key in buckets[0]],
        },
        "draft": {
            "columns": ["weights", "storyteller, ms per step", "draft, ms per step", "c", "best k", "gain"],
            "rows": [
                [kind, *d["milliseconds_per_step"].values(), d["c"], d["best_k"], d["gain"]]
                for kind, d in pays
            ],
        },
        "shapes": {
            "columns": ["layers x width", "million parameters", "plain, ms per step", "packed, ms per step"],
            "rows": figures["shapes"],
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--val", type=Path, default=Path("../shared/data/stories_val.txt"))
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2, help="of torch; steps are timed with 1")
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    began = time.time()
    tokenizer = Tokenizer.from_file(str(ZOO / "storyteller" / "tokenizer.json"))
    ids = tokenizer.encode(a.val.read_text()[:TEST_CHARACTERS]).ids
    figures: dict = {}
    loaded = {}
    for name in NAMES:
        model = loaded[name] = GPT2LMHeadModel.from_pretrained(ZOO / name, dtype=torch.float32).eval()
        size = sum(file.stat().st_size for file in (ZOO / name).iterdir())
        figures[name] = prediction(model, ids) | {"parameters": model.num_parameters(), "bytes_on_disk": size}
        print(f"{name}: {size:,} bytes,", figures[name], flush=True)
        figures[name]["training"] = json.loads((ZOO / name / "training.json").read_text())

    alpha = agreement(loaded["storyteller"], loaded["storyteller-draft"], ids)
    torch.set_num_threads(1)
    figures["draft"] = {"alpha": round(alpha, 4)}
    for kind in ("plain", "packed"):
        models = {name: load_model(name) for name in NAMES}
        figures["draft"][kind] = draft_pays(alpha, step_times(models, kind == "packed", ids))
    figures["shapes"] = shape_times(ids)
    torch.set_num_threads(a.threads)
    print("draft:", figures["draft"], "\nshapes:", figures["shapes"], flush=True)

    figures["requests"] = answers(loaded["storyteller"], tokenizer, a.requests)
    print("requests:", {k: v for k, v in figures["requests"].items() if k != "first"}, flush=True)
    figures["samples"] = [sample(*setting) for setting in SAMPLES]
    for told in figures["samples"]:
        print(f"--- {told['prompt']} ({told['tokens']} tokens, ended: {told['ended']})\n{told['text']}\n")

    workload = {
        "text": f"{a.val.name}, first {TEST_CHARACTERS:,} characters",
        "windows": "EOS and 1,023 tokens, no overlap, every token scored once",
        "requests": f"{a.requests} held-out pairs, seed 0, temperature 0.7, no top-k or top-p, 400 tokens",
        "steps": "batch 1, 1 thread, CachedForward at lengths 65 to 319; plain fp32 or packed weights",
        "alpha": "argmax(draft) == argmax(storyteller) on the same real prefix, all windows",
    }
    question = "How good are the embedded models, and does the draft pay?"
    path = record("embedded_models", question, workload, figures, tables(figures))
    for name in NAMES:
        card = ZOO / name / "README.md"
        card.write_text(render(card.read_text()))
    print(f"{time.time() - began:.0f} s, written to {path} and the model cards")


if __name__ == "__main__":
    main()
