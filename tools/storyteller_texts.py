"""What storyteller is trained on: the nouns that stories are about, requests in words, and documents made of
both. `tools/train_storyteller.py` does the training.

Promises the same texts from the same seed. Knows nothing of models.
"""

import itertools
import random
import re
import zlib
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

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


def new_requests(count: int, seed: int) -> list[tuple[str, list[tuple[str, str]]]]:
    """Requests that no story was there for, none of a held-out pair: (text, [(noun, adjective), ...])."""
    rng = random.Random(seed)
    requests: list[tuple[str, list[tuple[str, str]]]] = []
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
