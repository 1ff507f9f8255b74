"""Business letters to train an adapter on, made by rule: no licence to ask for, and as many as are wanted.

    python -m tools.business_letters 2 --seed 5

Promises the same letters from the same seed. A letter has a topic, a sender, a reader and facts; each of its
sentences is drawn from several that say the same (business_letters.toml). Knows nothing of models.
"""

import argparse
import random
import tomllib
from pathlib import Path

WORDS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
FACTS = WORDS["facts"]  # lists to draw from


def letter(rng: random.Random) -> tuple[str, str]:
    """(what a user might ask for, the letter)."""
    topic = WORDS["topics"][rng.choice(sorted(WORDS["topics"]))]
    theirs, ours, other = rng.sample(FACTS["companies"], 3)
    title, last = rng.choice(["Mr.", "Ms."]), rng.choice(FACTS["last"])
    facts = {
        "theirs": theirs, "other": other, "goods": rng.choice(FACTS["goods"]),
        "post": rng.choice(FACTS["posts"]),
        "n": rng.randrange(10, 500, 10), "number": rng.randrange(1000, 9999),
        "sum": rng.randrange(100, 9000, 10), "few": rng.choice(FACTS["few"]),
        "small": rng.choice(FACTS["small"]),
        "percent": rng.choice(FACTS["percent"]), "weekday": rng.choice(FACTS["weekdays"]),
        "hour": rng.choice(FACTS["hour"]),
        "date": _date(rng), "date2": _date(rng), "name": _name(rng),
    }  # fmt: skip
    paragraphs = [_paragraph(rng, topic["paragraph"], facts), _paragraph(rng, WORDS["closing"], facts)]
    name = _name(rng)
    signed = f"{rng.choice(WORDS['greeting'])}\n{name}\n{rng.choice(FACTS['posts'])}, {ours}"
    text = "\n\n".join([f"Dear {title} {last},", *filter(None, paragraphs), signed])
    return f"Write a letter about {topic['request']}", text


def _paragraph(rng: random.Random, sentences: list[list[str]], facts: dict) -> str:
    """One of each list; one that begins with "?" may be left out."""
    said = []
    for ways in sentences:
        if ways[0] == "?" and rng.random() < 0.5:
            continue
        said.append(rng.choice([way for way in ways if way != "?"]).format(**facts))
    return " ".join(said)


def _date(rng: random.Random) -> str:
    return f"{rng.choice(FACTS['months'])} {rng.randrange(1, 29)}"


def _name(rng: random.Random) -> str:
    return f"{rng.choice(FACTS['first'])} {rng.choice(FACTS['last'])}"


def letters(count: int, seed: int) -> list[tuple[str, str]]:
    """`count` different letters, each with what a user might ask for."""
    rng = random.Random(seed)
    found: dict[str, str] = {}  # text -> request
    while len(found) < count:
        request, text = letter(rng)
        found[text] = request
    return [(request, text) for text, request in found.items()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print("\n\n---\n\n".join(text for _, text in letters(options.count, options.seed)))
