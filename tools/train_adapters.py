"""Train the two adapters that ship with this repository, in PEFT's format: `adapters/poetry` on Shakespeare's
sonnets, `adapters/business` on letters made by rule (business_letters.py).

    nice python -m tools.train_adapters poetry --sonnets ../shared/data/sonnets_pg.txt
    nice python -m tools.train_adapters business

Minutes on one core. Promises that texts are dealt out to training, choice and test before anything else: the
number of passes is chosen on `dev`, and `test` is looked at by tools/evaluate_adapters.py alone.
"""

import argparse
import json
import math
import random
import re
import time
from pathlib import Path
from typing import NamedTuple

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tools.business_letters import letters
from tools.storyteller_texts import ASSISTANT, USER

ROOT = Path(__file__).parent.parent
BASE = ROOT / "engine" / "zoo" / "storyteller"
SUBJECTS = [
    "love", "time", "beauty", "summer", "winter", "night", "eyes", "heart", "death", "roses", "sweet",
    "youth", "spring", "sun",
]  # fmt: skip
EOS = 0
Text = tuple[str, str]  # what a user might ask for, and the text


class Settings(NamedTuple):
    """How an adapter is trained."""

    r: int
    lora_alpha: int
    rate: float
    passes: int
    rows: int
    seed: int


SETTINGS = {
    "poetry": Settings(r=8, lora_alpha=16, rate=3e-3, passes=5, rows=4, seed=0),
    "business": Settings(r=8, lora_alpha=16, rate=2e-3, passes=3, rows=4, seed=0),
}


def sonnets(path: Path) -> list[Text]:
    """The 154 sonnets, in order: each stands behind its Roman number."""
    found = re.split(r"^[IVXLC]+$", path.read_text(), flags=re.MULTILINE)[1:]
    texts = ["\n".join(line.rstrip() for line in text.strip("\n").splitlines()) for text in found]

    def subject(text: str) -> str:
        return max(SUBJECTS, key=lambda word: len(re.findall(rf"\b{word}\b", text.lower())))

    return [(f"Write a poem about {subject(text)}", text) for text in texts]


def dealt(name: str, sonnets_path: Path | None) -> dict[str, list[Text]]:
    """train, dev and test. No text is in two of them."""
    if name == "business":
        texts = letters(400, seed=1)
        return {"train": texts[:320], "dev": texts[320:360], "test": texts[360:]}
    if sonnets_path is None:
        raise ValueError("sonnets_path=None: the poems are read from a file")
    texts = sonnets(sonnets_path)
    random.Random(0).shuffle(texts)
    return {"train": texts[:126], "dev": texts[126:140], "test": texts[140:]}


def document(tokenizer: Tokenizer, text: Text, asked: bool) -> tuple[list[int], int]:
    """Its token ids, and how many of the first are given, not learnt. `asked`: as a chat turn."""
    request, body = text
    head = tokenizer.encode(f"{USER}{request}{ASSISTANT}" if asked else "<|endoftext|>").ids
    return [*head, *tokenizer.encode(body).ids, EOS], len(head)


def padded(documents: list[tuple[list[int], int]]) -> tuple[Tensor, Tensor]:
    """token ids and labels, each [documents, T]; a label of -100 is not learnt."""
    T = max(len(ids) for ids, _ in documents)
    token_ids, labels = torch.full((2, len(documents), T), -100)
    for row, (ids, given) in enumerate(documents):
        token_ids[row, : len(ids)] = torch.tensor(ids)
        labels[row, given : len(ids)] = torch.tensor(ids[given:])
    return token_ids.clamp(min=0), labels


@torch.inference_mode()
def perplexity(model: nn.Module, tokenizer: Tokenizer, texts: list[Text]) -> float:
    """exp of the mean loss of a token, over whole documents."""
    model.eval()
    nats = count = 0
    for text in texts:
        token_ids, labels = padded([document(tokenizer, text, asked=False)])
        tokens = int((labels != -100).sum())
        nats += model(input_ids=token_ids, labels=labels).loss.item() * tokens
        count += tokens
    return math.exp(nats / count)


def train(name: str, sonnets_path: Path | None, folder: Path) -> dict:
    """Train one adapter and save it; what was measured on the way."""
    settings = SETTINGS[name]
    torch.manual_seed(settings.seed)
    rng = random.Random(settings.seed)
    tokenizer = Tokenizer.from_file(str(BASE / "tokenizer.json"))
    texts = dealt(name, sonnets_path)
    config = LoraConfig(
        r=settings.r, lora_alpha=settings.lora_alpha, lora_dropout=0.1, task_type="CAUSAL_LM",
        target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True,
    )  # fmt: skip
    base = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    curve = [[0, round(perplexity(base, tokenizer, texts["dev"]), 2)]]
    model = get_peft_model(base, config)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, settings.rate, weight_decay=0.01)
    steps = settings.passes * math.ceil(len(texts["train"]) / settings.rows)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.rate, steps, pct_start=0.1)
    best, start = math.inf, time.perf_counter()
    kept: list[Tensor] = []  # the parameters of the best pass
    for number in range(1, settings.passes + 1):
        model.train()
        documents = [document(tokenizer, text, asked=rng.random() < 0.3) for text in texts["train"]]
        rng.shuffle(documents)
        for first in range(0, len(documents), settings.rows):
            token_ids, labels = padded(documents[first : first + settings.rows])
            model(input_ids=token_ids, labels=labels).loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        curve.append([number, round(perplexity(model, tokenizer, texts["dev"]), 2)])
        print(f"{time.perf_counter() - start:5.0f} s, pass {number}: perplexity {curve[-1][1]}", flush=True)
        if curve[-1][1] < best:
            best, kept = curve[-1][1], [p.detach().clone() for p in parameters]
    for parameter, value in zip(parameters, kept, strict=True):
        parameter.data.copy_(value)
    _save(model, folder)
    trained = {
        "name": name, **settings._asdict(), "dev_perplexity_by_pass": curve, "kept": best,
        "seconds": round(time.perf_counter() - start), "torch": torch.__version__,
        "parameters": sum(p.numel() for p in parameters),
    }  # fmt: skip
    (folder / "training.json").write_text(json.dumps(trained, indent=1) + "\n")
    return trained


def _save(model: PeftModel, folder: Path) -> None:
    """As PEFT does, in fp16, and without this machine's paths."""
    model.peft_config["default"].base_model_name_or_path = "storyteller"
    model.save_pretrained(folder)
    weights = folder / "adapter_model.safetensors"
    save_file({k: t.half() for k, t in load_file(weights).items()}, weights, metadata={"format": "pt"})
    (folder / "README.md").unlink(missing_ok=True)  # PEFT's empty card


def main() -> None:
    parser = argparse.ArgumentParser(description="Train an adapter.")
    parser.add_argument("name", choices=SETTINGS)
    parser.add_argument("--sonnets", type=Path, default=ROOT.parent / "shared" / "data" / "sonnets_pg.txt")
    parser.add_argument("--folder", type=Path, help="default: adapters/NAME")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(train(options.name, options.sonnets, options.folder or ROOT / "adapters" / options.name))


if __name__ == "__main__":
    main()
