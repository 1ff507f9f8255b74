"""Train the two embedded models from one text file: `storyteller`, which tells small stories on request, and
`storyteller-draft`, a one-layer model that guesses what storyteller says next.

Read `tools/storyteller_texts.py` first (nouns, requests, documents), then this from top to bottom: batches,
tokenizer, training loop, telling, files, recipe. In one breath: learn a byte-level BPE; dress the corpus many
times over, half of it as answered requests; train large teachers; let them tell stories on new requests and
keep the good ones; distil all that into small models, twice over; distil storyteller into its draft. Choices
were made on the validation file from character 200,000 on: the first 200,000 belong to
`tools/evaluate_models.py` alone.

    python -m tools.train_storyteller --train TRAIN.txt --val VAL.txt --work /tmp/zoo --out engine/zoo

Its stages add up to about 35 minutes of one H200; with several GPUs, those that need not wait for each other
run side by side. A stage that is done is not run again; `--stage NAME` runs one alone. Wants `transformers`
and `tokenizers`. Promises files any Hugging Face reader loads; knows nothing of the engine.
"""

import argparse
import json
import math
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # dressing already uses one process per core

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel

from tools.storyteller_texts import (
    ASSISTANT,
    EOS,
    SPECIALS,
    USER,
    chat,
    dress,
    good,
    new_requests,
    paragraphs,
    read_stories,
)


# --- 1. Batches --------------------------------------------------------------------------------------------
def batches(passes: list[tuple], rows: int, length: int, seed: int) -> Iterator[torch.Tensor]:
    """Endless [rows, length] tokens. Most rows begin where a document does: position 0 means a beginning."""
    rng = np.random.default_rng(seed)
    pending: list[np.ndarray] = []
    while True:
        documents, starts, bare = passes[rng.integers(len(passes))]
        cut = []
        for stream, begins in ((documents, starts), (bare, None)):
            at = np.arange(rng.integers(length), len(stream) - 2 * length, length)
            if begins is not None:
                back = begins[np.searchsorted(begins, at, side="right") - 1]
                at = np.where(rng.random(len(at)) < 0.6, back, at)
            cut += [stream[i : i + length] for i in at]
        rng.shuffle(cut)
        pending += cut
        while len(pending) >= rows:
            yield torch.from_numpy(np.stack(pending[:rows]).astype(np.int64))
            del pending[:rows]


# --- 2. Tokenizer ------------------------------------------------------------------------------------------
# A system message is put before the next user's turn: the model knows two roles.
CHAT_TEMPLATE = """
{%- set ns = namespace(preface='') -%}
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}{%- set ns.preface = ns.preface + message['content'] + '\\n' -%}
{%- elif message['role'] == 'user' -%}
{{- '<|user|>' + ns.preface + message['content'] -}}{%- set ns.preface = '' -%}
{%- elif message['role'] == 'assistant' -%}{{- '<|assistant|>' + message['content'] + '<|endoftext|>' -}}
{%- else -%}{{- raise_exception('role must be system, user or assistant, not ' + message['role']) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"""


def train_tokenizer(stories: list[str], size: int = 4096) -> Tokenizer:
    """GPT-2's kind: byte-level BPE with its split pattern, no space in front, nothing put around a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())  # all 256 bytes, whatever the corpus holds
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(SPECIALS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(map(paragraphs, stories), trainer)
    return tokenizer


# --- 3. Training -------------------------------------------------------------------------------------------
@torch.inference_mode()
def window_losses(model, ids: list[int], rows: int = 16) -> torch.Tensor:
    """Loss in nats of every token, [windows, 1023], NaN where the text has ended. Each window is EOS and the
    next 1,023 tokens, no overlap: each token is predicted once, from what its own window holds alone."""
    device, span = next(model.parameters()).device, 1023
    windows = torch.full((-(-len(ids) // span), span), -1, dtype=torch.long)
    windows.view(-1)[: len(ids)] = torch.tensor(ids)
    model.eval()
    losses = []
    for labels in windows.to(device).split(rows):
        inputs = F.pad(labels[:, :-1].clamp(min=0), (1, 0), value=0)
        logits = model(input_ids=inputs, use_cache=False).logits.float().flatten(0, 1)
        loss = F.cross_entropy(logits, labels.clamp(min=0).flatten(), reduction="none").view_as(labels)
        losses.append(loss.masked_fill(labels < 0, float("nan")).cpu())
    return torch.cat(losses)


def fit(model, source: Iterator, guides: list, stage: "Stage", dev: tuple[list[int], int]) -> dict:
    """AdamW, warm-up then cosine to zero, bf16. With guides the loss is `stage.soft` parts their mean
    distribution, the rest the text itself. Returns seconds, (step, train loss, dev bits per character)."""
    device = next(model.parameters()).device
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": stage.decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=device.type == "cuda")
    fast = torch.compile if device.type == "cuda" else lambda module: module
    run, views = fast(model), [fast(guide) for guide in guides]
    began, losses, curve = time.time(), [], []
    for step in range(1, stage.steps + 1):
        model.train()
        rate = stage.rate * min(1, step / 200) * 0.5 * (1 + math.cos(math.pi * (step - 1) / stage.steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids = next(source).to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16):
            logits = run(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1).float()
            with torch.no_grad():
                seen = [view(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1) for view in views]
        loss = F.cross_entropy(logits, ids[:, 1:].flatten())
        if seen:
            target = sum(view.float().softmax(-1) for view in seen) / len(seen)
            loss = (1 - stage.soft) * loss + stage.soft * F.cross_entropy(logits, target)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
        if step % max(stage.steps // 8, 1) == 0:
            bits = window_losses(model, dev[0]).nansum().item() / math.log(2) / dev[1]
            curve.append((step, round(torch.stack(losses[-100:]).mean().item(), 4), round(bits, 4)))
            print(f"{stage.name}: step, train loss, dev bits per character {curve[-1]}", flush=True)
    return {"seconds": round(time.time() - began, 1), "curve": curve}


# --- 4. Telling stories ------------------------------------------------------------------------------------
def nudge(wanted: list[list[str]], tokenizer: Tokenizer, start: int, strength: float, device) -> list:
    """A logits processor that makes each wanted word `strength` nats likelier until it has been said: the
    story comes to it where it nearly fits anyway, more often than a filter on plain samples finds it."""
    spelled = [[tokenizer.encode(f" {word}").ids for word in words] for words in wanted]
    tokens = [[ids[0] for ids in words if len(ids) == 1] for words in spelled]
    width = max(map(len, tokens), default=0)
    ids = torch.tensor([row + [0] * (width - len(row)) for row in tokens], device=device)  # 0, EOS: no word

    def process(said: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        missing = (ids > 0) & ~(said[:, start:, None] == ids[:, None, :]).any(1)
        return scores.scatter_add(1, ids, missing.to(scores.dtype) * strength)

    return [process] if width else []


@torch.inference_mode()
def tell(
    model, tokenizer: Tokenizer, prompts: list[str], temperature: float, limit: int, seed: int,
    wanted: list[list[str]] | None = None, strength: float = 0.0, rows: int = 8192,
) -> list[tuple[str, int, bool]]:  # fmt: skip
    """Sample from the whole distribution, many at a time: [(text, tokens, whether it ended by itself)]."""
    torch.manual_seed(seed)
    device = next(model.parameters()).device
    model.eval()
    answers = []
    for first in range(0, len(prompts), rows):
        ids = [tokenizer.encode(prompt).ids for prompt in prompts[first : first + rows]]
        longest = max(map(len, ids))
        inputs = torch.tensor([[0] * (longest - len(i)) + i for i in ids], device=device)
        mask = torch.tensor([[0] * (longest - len(i)) + [1] * len(i) for i in ids], device=device)
        nudges = nudge(wanted[first : first + rows], tokenizer, longest, strength, device) if wanted else []
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            out = model.generate(
                inputs, attention_mask=mask, do_sample=True, temperature=temperature, top_k=0, top_p=1.0,
                max_new_tokens=limit, pad_token_id=0, eos_token_id=0, logits_processor=nudges,
            )  # fmt: skip
        for row in out[:, longest:].tolist():
            length = row.index(0) if 0 in row else len(row)
            answers.append((tokenizer.decode(row[:length]), length, 0 in row))
    return answers


# --- 5. Files ----------------------------------------------------------------------------------------------
def export(model, tokenizer: Tokenizer, folder: Path) -> None:
    """The standard Hugging Face files, weights in fp16."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):  # a model with dropout has these fields
        if hasattr(model.config, name):
            setattr(model.config, name, 0.0)
    model.half().save_pretrained(folder)
    model.float()
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.model.save(str(folder))  # vocab.json and merges.txt
    fields: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    fields |= {f"{role}_token": EOS for role in ("bos", "eos", "unk", "pad")}
    fields |= {"additional_special_tokens": [USER, ASSISTANT], "model_max_length": 1024}
    fields |= {"clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE.replace("\n", "")}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields, indent=2) + "\n")
    generation = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


# --- 6. Recipe ---------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Stage:
    """One model: its shape, how it is trained and from whom, and how many new requests it answers then."""

    name: str
    seed: int = 0
    width: int = 256
    layers: int = 6
    heads: int = 4
    dropout: float = 0.05
    decay: float = 1.0
    rate: float = 3e-3
    steps: int = 4000
    rows: int = 24
    guides: tuple[str, ...] = ()
    soft: float = 0.0  # weight of the guides' distribution in the loss
    told: tuple[str, ...] = ()  # whose stories are learnt besides the corpus
    share: float = 0.0  # how many of them per pass, over the number of stories in the corpus
    tells: int = 0
    temperature: float = 0.8
    strength: float = 4.0


Fields = dict[str, Any]  # of a Stage: what several have in common
BIG: Fields = {"told": ("scout",), "share": 0.6, "steps": 3000, "decay": 2.0, "dropout": 0.3, "tells": 4096}
TEACHERS = ("teacher-a", "teacher-b", "teacher-c", "teacher-d")
ONE: Fields = {
    "guides": TEACHERS,
    "told": ("scout", *TEACHERS),
    "share": 0.8,
    "tells": 12288,
    "temperature": 0.9,
}
FIRST = ("first-a", "first-b", "first-c")
TWO: Fields = {"guides": FIRST, "told": FIRST, "share": 1.2, "tells": 12288, "strength": 3.0}
SECOND = ("second-a", "second-b", "second-c")
LAST: Fields = {"guides": SECOND, "told": FIRST + SECOND, "share": 2.2}
DRAFT: Fields = {"guides": ("storyteller",), "told": SECOND, "share": 1.0}
RECIPE = [
    Stage("scout", dropout=0.2, steps=3000, tells=16384, strength=5.0),
    Stage("teacher-a", width=512, layers=8, heads=8, rate=2e-3, **BIG),
    Stage("teacher-b", seed=1, width=512, layers=8, heads=8, rate=1e-3, **BIG | {"decay": 3.0}),
    Stage("teacher-c", seed=2, width=384, layers=8, heads=6, rate=2e-3, **BIG | {"dropout": 0.2}),
    Stage("teacher-d", seed=3, width=640, layers=6, heads=10, rate=1.5e-3, **BIG),
    Stage("first-a", soft=0.9, **ONE),
    Stage("first-b", soft=0.6, **ONE | {"tells": 24576}),
    Stage("first-c", soft=0.9, dropout=0.0, decay=0.3, **ONE),
    Stage("second-a", soft=0.5, **TWO),
    Stage("second-b", seed=1, soft=0.5, dropout=0.0, decay=0.5, **TWO),
    Stage("second-c", seed=3, soft=0.3, decay=1.5, **TWO | {"tells": 24576}),
    Stage("storyteller", seed=6, soft=0.3, dropout=0.1, decay=1.5, steps=3600, **LAST),
    Stage("storyteller-draft", layers=1, dropout=0.0, decay=0.1, soft=1.0, steps=6000, **DRAFT),
]


def run_stage(stage: Stage, a: argparse.Namespace) -> None:
    """Train one model into `work/NAME`, then let it tell: the good stories go to `work/NAME.json`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer_file = str(a.work / "tokenizer.json")
    stories, tokenizer = read_stories(a.train), Tokenizer.from_file(tokenizer_file)
    rng = random.Random(stage.seed)
    told = [turn for name in stage.told for turn in json.loads((a.work / f"{name}.json").read_text())]
    shares = [rng.sample(told, min(len(told), int(stage.share * len(stories)))) for _ in range(a.passes)]
    with ProcessPoolExecutor() as pool:
        jobs = [(stories, share, tokenizer_file, 1000 * stage.seed + i) for i, share in enumerate(shares)]
        passes = list(pool.map(dress, *zip(*jobs, strict=True)))

    torch.manual_seed(stage.seed)
    torch.set_float32_matmul_precision("high")
    shape = {"n_embd": stage.width, "n_layer": stage.layers, "n_head": stage.heads, "n_positions": 1024}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), stage.dropout)
    vocabulary = {"vocab_size": tokenizer.get_vocab_size(), "bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(**vocabulary, **shape, **drops)).to(device)
    load = GPT2LMHeadModel.from_pretrained
    guides = [load(a.work / guide, dtype=torch.float32).to(device).eval() for guide in stage.guides]
    dev = a.val.read_text()[200_000:500_000]
    source = batches(passes, stage.rows, 1024, stage.seed)
    record = fit(model, source, guides, stage, (tokenizer.encode(dev).ids, len(dev)))
    record |= asdict(stage) | {"parameters": model.num_parameters(), "torch": torch.__version__}
    record["machine"] = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    export(model, tokenizer, a.work / stage.name)
    (a.work / stage.name / "training.json").write_text(json.dumps(record, indent=1) + "\n")

    if stage.tells:
        requests = new_requests(stage.tells, 100 + RECIPE.index(stage))
        wanted = [[word for want in wants for word in want if word] for _, wants in requests]
        prompts = [f"{USER}{text}{ASSISTANT}" for text, _ in requests]
        nudged = (stage.seed, wanted, stage.strength)
        answers = tell(model, tokenizer, prompts, stage.temperature, 400, *nudged)
        pairs = zip(requests, answers, strict=True)
        kept = [chat(text, answer[0]) for (text, wants), answer in pairs if good(*answer, wants)]
        (a.work / f"{stage.name}.json").write_text(json.dumps(kept))
        print(f"{stage.name}: kept {len(kept)} of {len(requests)} stories", flush=True)
    if a.out and stage.name.startswith("storyteller"):
        shutil.copytree(a.work / stage.name, a.out / stage.name, dirs_exist_ok=True)
    (a.work / f"{stage.name}.done").touch()


def run_all(a: argparse.Namespace) -> None:
    """Every stage, on the first free GPU, as soon as those it learns from are done. Each has a process of its
    own, which leaves no memory behind; an empty `NAME.done` is a stage's last act."""
    free = [str(gpu) for gpu in range(torch.cuda.device_count())] or [""]
    done = {stage.name for stage in RECIPE if (a.work / f"{stage.name}.done").exists()}
    waiting = [stage for stage in RECIPE if stage.name not in done]
    running: list[tuple[str, subprocess.Popen, str]] = []  # (name, process, GPU)
    while waiting or running:
        for stage in [s for s in waiting if done.issuperset(s.guides + s.told)][: len(free)]:
            gpu, command = free.pop(), [sys.executable, "-m", "tools.train_storyteller", *sys.argv[1:]]
            command += ["--stage", stage.name]
            process = subprocess.Popen(command, env=os.environ | {"CUDA_VISIBLE_DEVICES": gpu})
            waiting.remove(stage)
            running.append((stage.name, process, gpu))
        time.sleep(1)
        for ended in [job for job in running if job[1].poll() is not None]:
            name, process, gpu = ended
            running.remove(ended)
            if process.returncode:
                for _, other, _ in running:
                    other.terminate()
                raise SystemExit(f"{name} ended with {process.returncode}")
            done.add(name)
            free.append(gpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--val", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder for everything in between")
    parser.add_argument("--out", type=Path, help="folder for the two finished models")
    parser.add_argument("--stage", choices=[stage.name for stage in RECIPE], help="run this one alone")
    parser.add_argument("--passes", type=int, default=24, help="dressings of the corpus to draw batches from")
    a = parser.parse_args()
    a.work.mkdir(parents=True, exist_ok=True)
    if not (a.work / "tokenizer.json").exists():
        train_tokenizer(read_stories(a.train)).save(str(a.work / "tokenizer.json"))
    if a.stage:
        run_stage(next(stage for stage in RECIPE if stage.name == a.stage), a)
        return
    run_all(a)


if __name__ == "__main__":
    main()
