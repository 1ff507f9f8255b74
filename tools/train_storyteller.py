"""Train the two embedded models from one text file: `storyteller`, which tells small stories on request, and
`storyteller-draft`, a one-layer model that guesses what storyteller says next.

Read it top to bottom: nouns, requests, documents, tokenizer, training loop, telling, files, recipe. In one
breath: learn a byte-level BPE; dress the corpus many times over, half of it as answered requests; train large
teachers; let them tell stories on new requests and keep the good ones; distil all that into small models,
twice over; distil storyteller into its draft. Choices were made on the validation file from character 200,000
on: the first 200,000 belong to `tools/evaluate_models.py` alone.

    python tools/train_storyteller.py --train TRAIN.txt --val VAL.txt --work /tmp/zoo --out engine/zoo

Its stages add up to about 35 minutes of one H200; with several GPUs, those that need not wait for each other
run side by side. A stage that is done is not run again; `--stage NAME` runs one alone. Wants `transformers`
and `tokenizers`. Promises files any Hugging Face reader loads; knows nothing of the engine.
"""

import argparse
import itertools
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # dressing already uses one process per core

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel

# --- 1. Nouns ----------------------------------------------------------------------------------------------
# Frequent after a determiner in the corpus, filtered by hand. One group a line: a noun may stand in for
# another of its group, so that the model has to read the request instead of guessing the likely story.
NOUN_GROUPS = """
bird dog cat bear fish rabbit bug mouse bunny frog squirrel butterfly duck lion monkey puppy bee \
elephant fox cow owl horse dragon pig spider ant kitten chicken snake turtle dinosaur tiger crab \
worm giraffe caterpillar sheep goat octopus zebra deer bull parrot shark whale wolf dolphin swan \
ladybug penguin
ball box flower rock picture book stick bag dress hat doll gift bowl blanket bucket stone button \
basket pot bottle balloon feather cup key coat crayon shirt spoon coin jar towel letter rope puzzle \
bell wand shell ring brush pen kite mirror pillow bone map candle crown phone whistle pencil \
necklace vase flag drum flute scarf sword lamp hammer umbrella leaf robot
car boat truck bike train plane rocket bus wagon ship
door bed window table chair bench couch fence gate ladder swing slide
cake cookie apple carrot sandwich banana lemon pizza pie egg
honey milk juice candy chocolate cheese soup bread
park tree house garden forest store pond hill beach field school castle river lake farm shop puddle \
village meadow playground road cave jungle tower market mountain pool hospital zoo barn island \
bridge library
girl boy baby lady teacher doctor farmer princess fairy monster king pirate queen nurse knight giant \
ghost clown witch prince pilot sailor
sun moon sea star cloud rainbow rain snow storm wind"""
GROUPS = [line.split() for line in NOUN_GROUPS.strip().splitlines()]
NOUNS = [noun for group in GROUPS for noun in group]
GROUP_OF = {noun: group for group in GROUPS for noun in group}
THE_ONLY = {"sun", "moon", "sea", "rain", "wind"}
UNCOUNTED = {*GROUP_OF["honey"], "snow"}
IRREGULAR = {"mouse": "mice", "wolf": "wolves", "leaf": "leaves"} | {n: n for n in ("fish", "sheep", "deer")}
LOOKS = """red blue green yellow pink purple white black brown big little small tiny huge old new shiny
pretty soft happy sad funny kind brave friendly lonely hungry sleepy clever silly magic scary lost"""
ADJECTIVES = LOOKS.split()


def plural(noun: str) -> str:
    """The plural as the stories spell it: `fox` -> `foxes`, `puppy` -> `puppies`, `mouse` -> `mice`."""
    if noun in IRREGULAR:
        return IRREGULAR[noun]
    if re.search(r"(s|x|ch|sh)$", noun):
        return noun + "es"
    return noun[:-1] + "ies" if re.search(r"[^aeiou]y$", noun) else noun + "s"


NOUN_OF_WORD = {plural(noun): noun for noun in NOUNS} | {noun: noun for noun in NOUNS}


def held_out(first: str, second: str) -> bool:
    """Whether no training request may name both nouns: one pair in ten, settled by a hash, not by a list."""
    return zlib.crc32(" ".join(sorted((first, second))).encode()) % 10 == 0


def allowed(nouns: list[str]) -> bool:
    """Whether a training request may name these nouns together."""
    return not any(held_out(a, b) for a, b in itertools.combinations(nouns, 2))


def contains(text: str, noun: str, adjective: str = "") -> bool:
    """Whether the whole word, or its plural, stands in `text`; with an adjective, right behind it."""
    words = rf"{adjective} ({noun}|{plural(noun)})" if adjective else f"({noun}|{plural(noun)})"
    return re.search(rf"\b{words}\b", text, re.IGNORECASE) is not None


# --- 2. Requests -------------------------------------------------------------------------------------------
EOS, USER, ASSISTANT = SPECIALS = ("<|endoftext|>", "<|user|>", "<|assistant|>")  # ids 0, 1 and 2
ASKS = (
    ["Tell me {}"] * 6
    + """Please tell me {}|Can you tell me {}|Could you write {}|Write {}|I want {}|
Tell us {}|I would like {}|Make up {}|{}|Tell me {}, please|Hi! Tell me {}|Write me {}""".replace(
        "\n", ""
    ).split("|")
)
PREFACES = ["You are a storyteller.", "You are a helpful assistant.", "You tell stories to children."]


def phrase(noun: str, adjective: str = "", article: str = "a") -> str:
    """The noun as a request names it: `a red ball`, `an owl`, `the sun`, `some honey`."""
    words = f"{adjective} {noun}".strip()
    if noun in THE_ONLY or article == "the":
        return f"the {words}"
    if noun in UNCOUNTED:
        return f"some {words}"
    return f"an {words}" if words[0] in "aeiou" else f"a {words}"


def ask(things: list[str], rng: random.Random, kind: str = "story") -> str:
    """A request in one of many wordings, for a story about `things` (any number of them, already worded)."""
    what = f"a {kind}"
    if things:
        listed = " and ".join(filter(None, [", ".join(things[:-1]), things[-1]]))
        what += f" {rng.choice(('about', 'about', 'about', 'with'))} {listed}"
    text = rng.choice(ASKS).format(what)
    text = text[0].upper() + text[1:] if rng.random() < 0.9 else text.lower()
    text += rng.choice(("", ".", ".", "?" if text.startswith("C") else "!"))
    return f"{rng.choice(PREFACES)}\n{text}" if rng.random() < 0.05 else text


def chat(request: str, story: str) -> str:
    """One turn as the chat template writes it."""
    return f"{USER}{request}{ASSISTANT}{story}{EOS}"


def request_for(story: str, rng: random.Random) -> tuple[str, str]:
    """A request that `story` answers, and the story, in which nouns were often replaced by their like."""
    words = set(re.findall("[a-z]+", story.lower()))
    present = sorted({NOUN_OF_WORD[word] for word in words if word in NOUN_OF_WORD})
    chosen = rng.sample(present, min(len(present), rng.choices((0, 1, 2, 3), (1, 3, 10, 3))[0]))
    for i, old in enumerate(chosen[:2]):
        others = [noun for noun in GROUP_OF[old] if noun not in present and noun not in chosen]
        if others and rng.random() < 0.4:
            chosen[i] = rng.choice(others)
            story = swap(story, old, chosen[i])
    rng.shuffle(chosen)
    while not allowed(chosen):
        chosen.pop()
    things = []
    for noun in chosen:
        named = re.search(rf"\b{noun} (?:named|called) ([A-Z][a-z]+)", story)
        described = re.findall(rf"\b({'|'.join(ADJECTIVES)}) {noun}\b", story)
        if named and rng.random() < 0.3:
            things.append(f"{phrase(noun)} named {named[1]}")
        elif re.search(rf"\b{plural(noun)}\b", story) and noun not in UNCOUNTED and rng.random() < 0.15:
            things.append(plural(noun))
        else:
            adjective = rng.choice(described) if described and rng.random() < 0.5 else ""
            things.append(phrase(noun, adjective, rng.choice(("a", "a", "a", "a", "the"))))
    return ask(things, rng, rng.choice(("story", "story", "short story", "little story"))), story


def swap(story: str, old: str, new: str) -> str:
    """`story` with one noun replaced throughout, its plural, capital and a/an included."""

    def replace(match: re.Match) -> str:
        article, word = match[1] or "", match[2]
        other = plural(new) if word.lower() == plural(old) != old else new
        if article:
            article = article[0] + ("n " if other[0] in "aeiou" else " ")
        return article + (other.capitalize() if word[0].isupper() else other)

    return re.sub(rf"\b(an? )?({old}|{plural(old)})\b", replace, story, flags=re.IGNORECASE)


# --- 3. Documents ------------------------------------------------------------------------------------------
OPENING = re.compile(r"(?:Once|One day)[^.]{0,80}? (boy|girl) (?:named|called) ([A-Z][a-z]+)\.\s+")
LATER = "The next day,|The next morning,|A few days later,|One sunny day,|The day after that,|One week later,"


def read_stories(path: Path) -> list[str]:
    return [story.strip() for story in path.read_text().split(EOS) if len(story.strip()) > 100]


def paragraphs(story: str) -> str:
    """The story with a blank line between paragraphs, as the validation text has it."""
    return re.sub(r"\s*\n+", "\n\n", story.strip())


def long_story(openings: list[tuple], rng: random.Random, limit: int = 3700) -> tuple[str, str, str]:
    """Several days in the life of one child, so that far positions are learnt on one story: a story, then
    others of their kind with the hero renamed. Returns (boy or girl, name, up to `limit` characters)."""
    kind, name, first, rest = rng.choice(openings)
    parts = [first + rest]
    for other_kind, other, _, episode in rng.sample(openings, min(40, len(openings))):
        if other_kind == kind and (other == name or not re.search(rf"\b{name}\b", episode)):
            if sum(map(len, parts)) + len(episode) > limit:
                break
            hello = f"{rng.choice(LATER.split('|'))} {name} woke up early. "
            parts.append(hello + re.sub(rf"\b{other}\b", name, episode))
    parts = [re.sub(r"\s*The end\.?\s*$", "", part) for part in parts]
    return kind, name, paragraphs("\n".join(parts) + "\nThe end.")


def dress(stories: list[str], told: list[str], tokenizer_file: str, seed: int) -> tuple[np.ndarray, ...]:
    """One pass over the corpus, freshly shuffled and dressed, as two token streams.

    Returns (documents, where each begins, bare text). Documents end in EOS, most are chat turns, and `told`
    are chat turns already; bare text has a blank line where a story ends, as the validation text has.
    """
    rng = random.Random(seed)
    tokenizer = Tokenizer.from_file(tokenizer_file)
    documents, bare = list(told), []
    for story in stories:
        share = rng.random()
        if share < 0.25:
            bare.append(paragraphs(story))
        elif share < 0.45:
            documents.append((paragraphs(story) if rng.random() < 0.7 else story) + EOS)
        else:
            documents.append(chat(*request_for(paragraphs(story), rng)))
    openings = [(m[1], m[2], m[0], s[m.end() :]) for s in stories if (m := OPENING.match(s)) and len(s) > 500]
    for _ in range(len(stories) // 40 if openings else 0):
        kind, name, story = long_story(openings, rng)
        things = [phrase(kind) + (f" named {name}" if rng.random() < 0.7 else "")]
        documents.append(chat(ask(things, rng, "long story"), story))
    rng.shuffle(documents)
    rng.shuffle(bare)
    ids = [encoding.ids for encoding in tokenizer.encode_batch(documents)]
    starts = np.cumsum([0] + [len(i) for i in ids[:-1]])
    stream = np.fromiter(itertools.chain.from_iterable(ids), np.uint16)
    return stream, starts, np.array(tokenizer.encode("\n\n".join(bare)).ids, np.uint16)


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


# --- 4. Tokenizer ------------------------------------------------------------------------------------------
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
    options = {"special_tokens": list(SPECIALS), "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(map(paragraphs, stories), trainers.BpeTrainer(vocab_size=size, **options))
    return tokenizer


# --- 5. Training -------------------------------------------------------------------------------------------
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


# --- 6. Telling stories ------------------------------------------------------------------------------------
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


def new_requests(count: int, seed: int) -> list[tuple[str, list[tuple[str, str]]]]:
    """Requests that no story was there for, none of a held-out pair: (text, [(noun, adjective), ...])."""
    rng = random.Random(seed)
    requests = []
    while len(requests) < count:
        nouns = rng.sample(NOUNS, rng.choices((0, 1, 2, 3), (1, 3, 14, 3))[0])
        if allowed(nouns):
            wanted = [(noun, rng.choice(ADJECTIVES) if rng.random() < 0.25 else "") for noun in nouns]
            things = [phrase(*want, rng.choice(("a", "a", "a", "the"))) for want in wanted]
            requests.append((ask(things, rng), wanted))
    return requests


def good(text: str, length: int, ended: bool, wanted: list[tuple[str, str]]) -> bool:
    """Whether a told story is worth learning from: it does what was asked, ends by itself, and does not go in
    circles (the corpus's own stories nearly all pass each bound)."""
    words = re.findall("[a-z']+", text.lower())
    triples = list(zip(words, words[1:], words[2:], strict=False))
    most = max((words.count(noun) for noun in set(words) & NOUN_OF_WORD.keys()), default=0)
    circles = len(set(triples)) < 0.95 * len(triples) or most > 0.065 * len(words)
    twins = re.search(r"\b(?!and\b)(\w+),? and (?:the |his |her )?\1\b", text)  # "the bear and the bear"
    return ended and length >= 60 and not circles and not twins and all(contains(text, *w) for w in wanted)


# --- 7. Files ----------------------------------------------------------------------------------------------
def export(model, tokenizer: Tokenizer, folder: Path) -> None:
    """The standard Hugging Face files, weights in fp16."""
    folder.mkdir(parents=True, exist_ok=True)
    model.config.resid_pdrop = model.config.embd_pdrop = model.config.attn_pdrop = 0.0
    model.half().save_pretrained(folder)
    model.float()
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.model.save(str(folder))  # vocab.json and merges.txt
    fields = {"tokenizer_class": "PreTrainedTokenizerFast"}
    fields |= {f"{role}_token": EOS for role in ("bos", "eos", "unk", "pad")}
    fields |= {"additional_special_tokens": [USER, ASSISTANT], "model_max_length": 1024}
    fields |= {"clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE.replace("\n", "")}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields, indent=2) + "\n")
    generation = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


# --- 8. Recipe ---------------------------------------------------------------------------------------------
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


BIG = {"told": ("scout",), "share": 0.6, "steps": 3000, "decay": 2.0, "dropout": 0.3, "tells": 4096}
TEACHERS = ("teacher-a", "teacher-b", "teacher-c", "teacher-d")
ONE = {"guides": TEACHERS, "told": ("scout", *TEACHERS), "share": 0.8, "tells": 12288, "temperature": 0.9}
FIRST = ("first-a", "first-b", "first-c")
TWO = {"guides": FIRST, "told": FIRST, "share": 1.2, "tells": 12288, "strength": 3.0}
SECOND = ("second-a", "second-b", "second-c")
LAST = {"guides": SECOND, "told": FIRST + SECOND, "share": 2.2}
DRAFT = {"guides": ("storyteller",), "told": SECOND, "share": 1.0}
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
    waiting, running = [stage for stage in RECIPE if stage.name not in done], []
    while waiting or running:
        for stage in [s for s in waiting if done.issuperset(s.guides + s.told)][: len(free)]:
            gpu, command = free.pop(), [sys.executable, *sys.argv, "--stage", stage.name]
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
