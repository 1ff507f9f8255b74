"""How fast does our tokenizer read text, and what did each idea in it buy?

    python -m benchmarks.part01_tokenizer [--text FILE] [--learned-from FILE]

Five sides read the same text in one run, taking turns: byte-pair encoding that rescans the word after every
merge, the heap of `Tokenizer.merge`, `Tokenizer.encode` (the heap, each distinct word merged only once), and
Hugging Face's `tokenizers` (Rust), whose `encode` also notes where in the text each token stands, and whose
`encode_batch_fast` does not. Then three of them on one word that grows. Every side's ids are compared.
"""

import argparse
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import regex
import tokenizers
import torch

from benchmarks.record import DATA, corpus, middle, quartiles, record, show
from engine.models.checkpoint import read_json, resolve
from engine.text.tokenizer import Tokenizer
from engine.text.tokenizer_files import GPT2_PATTERN

Sides = dict[str, Callable[[str], list[int]]]
MODEL = "storyteller"
RESCAN, HEAP, CACHE = "rescan after every merge", "heap", "heap + word cache (the engine)"
OFFSETS, RUST = "tokenizers (Rust), ids and places in the text", "tokenizers (Rust), ids only"
LETTERS = "etaoinshrdlu"
WORD_LENGTHS = (500, 1000, 2000, 4000, 8000)  # letters, which here are bytes


def rescan_merge(ids: list[int], merges: dict[tuple[int, int], tuple[int, int]]) -> list[int]:
    """Byte-pair encoding as it is defined: look at every pair, merge the best one, start again."""
    ids = list(ids)
    while known := [(merges[pair], i) for i, pair in enumerate(pairwise(ids)) if pair in merges]:
        (_, merged), i = min(known)  # lowest rank first, then leftmost
        ids[i : i + 2] = [merged]
    return ids


def sides() -> Sides:
    """Fresh tokenizers, nothing cached: text -> ids."""
    folder = resolve(MODEL)
    model = read_json(folder / "tokenizer.json")["model"]
    vocab, pairs = model["vocab"], [tuple(m.split(" ")) if isinstance(m, str) else m for m in model["merges"]]
    merges = {(vocab[a], vocab[b]): (rank, vocab[a + b]) for rank, (a, b) in enumerate(pairs)}
    ours = Tokenizer.from_pretrained(folder)
    id_of_byte = {ours.token_bytes(id): id for id in range(ours.vocab_size)}
    theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))

    def words(text: str) -> Iterator[list[int]]:
        for word in regex.findall(GPT2_PATTERN, text):
            yield [id_of_byte[bytes([byte])] for byte in word.encode()]

    return {
        RESCAN: lambda text: [id for word in words(text) for id in rescan_merge(word, merges)],
        HEAP: lambda text: [id for word in words(text) for id in ours.merge(word)],
        CACHE: ours.encode,
        OFFSETS: lambda text: theirs.encode(text).ids,
        RUST: lambda text: theirs.encode_batch_fast([text])[0].ids,
    }


def seconds(text: str, names: list[str], repeats: int) -> tuple[dict[str, list[float]], int]:
    """Each side's seconds by round, and the text's length in tokens. The sides take turns and must agree."""
    taken: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(repeats):
        fresh = sides()
        answers = []
        for name in names:
            start = time.perf_counter()
            answers.append(fresh[name](text))
            taken[name].append(time.perf_counter() - start)
        assert all(ids == answers[0] for ids in answers), "the sides disagree"
    return taken, len(answers[0])


def measure_text(text: str, repeats: int) -> tuple[dict, dict]:
    """Every side on the text, and on words that never come twice. Returns (table, figures)."""
    rng = random.Random(0)
    unrepeated = "".join(" " + "".join(rng.choices(LETTERS, k=rng.randint(7, 12))) for _ in range(20_000))
    names = [RESCAN, HEAP, CACHE, OFFSETS, RUST]
    (taken, tokens), (taken_unrepeated, _) = (seconds(t, names, repeats) for t in (text, unrepeated))
    megabytes = len(text.encode()) / 1e6
    speeds = {name: [megabytes / t for t in times] for name, times in taken.items()}
    speeds_unrepeated = {
        name: [len(unrepeated) / 1e6 / t for t in times] for name, times in taken_unrepeated.items()
    }
    speed, speed_unrepeated = (
        {name: statistics.median(of[name]) for name in names} for of in (speeds, speeds_unrepeated)
    )
    table = {
        "columns": ["side", "stories, MB/s", "against rescanning", "random words, MB/s"],
        "rows": [
            [
                name, middle(speeds[name]), f"{speed[name] / speed[RESCAN]:.1f} ×",
                middle(speeds_unrepeated[name]),
            ]
            for name in names
        ],
    }  # fmt: skip
    words = regex.findall(GPT2_PATTERN, text)
    return table, {
        "megabytes": megabytes,
        "tokens": tokens,
        "bytes_per_token": megabytes * 1e6 / tokens,
        "words": len(words),
        "distinct_words": len(set(words)),
        "rounds_mb_per_s": {name: quartiles(of) for name, of in speeds.items()},
        "rescan_mb_per_s": speed[RESCAN],
        "engine_mb_per_s": speed[CACHE],
        "heap_over_rescan": speed[HEAP] / speed[RESCAN],
        "engine_over_rescan": speed[CACHE] / speed[RESCAN],
        "engine_over_rust": speed[CACHE] / speed[RUST],
        "rust_over_engine_unrepeated": speed_unrepeated[RUST] / speed_unrepeated[CACHE],
    }


def measure_dictionary(text: str, learned_from: str) -> dict:
    """What a dictionary of the commonest words of another text, as many as we have tokens, does not know."""
    size = Tokenizer.from_pretrained(MODEL).vocab_size
    counts = Counter(regex.findall(GPT2_PATTERN, learned_from))
    known = {word for word, _ in counts.most_common(size)}
    words = regex.findall(GPT2_PATTERN, text)
    unknown = [word for word in words if word not in known]
    return {"size": size, "unknown": len(unknown), "distinct_unknown": len(set(unknown))}


def measure_long_word(text: str, repeats: int) -> tuple[dict, dict]:
    """One word that grows: the letters of the text without anything between. Returns (table, figures)."""
    letters = "".join(char for char in text if char.isascii() and char.isalpha())
    rows = []
    for length in WORD_LENGTHS:
        by_round, _ = seconds(letters[:length], [RESCAN, HEAP, RUST], repeats)
        taken = {name: statistics.median(times) for name, times in by_round.items()}
        milliseconds = [taken[name] * 1e3 for name in (RESCAN, HEAP, RUST)]
        rows.append([length, *milliseconds, f"{taken[RESCAN] / taken[HEAP]:.0f} ×"])
    columns = ["letters in the word", "rescan, ms", "heap, ms", "tokenizers, ms", "rescan / heap"]
    (short, short_rescan, short_heap, *_), (long, long_rescan, long_heap, *_) = rows[0], rows[-1]
    return {"columns": columns, "rows": rows}, {
        "letters": long,
        "longer": long / short,
        "rescan_growth": long_rescan / short_rescan,
        "heap_growth": long_heap / short_heap,
        "rescan_seconds": long_rescan / 1e3,
        "heap_ms": long_heap,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, default=DATA / "stories_val.txt")
    parser.add_argument("--learned-from", type=Path, default=DATA / "stories_train.txt")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    text, learned_from = corpus(arguments.text), corpus(arguments.learned_from)

    speed, text_figures = measure_text(text, arguments.repeats)
    long_word, long_word_figures = measure_long_word(text, arguments.repeats)
    dictionary_figures = measure_dictionary(text, learned_from)
    path = record(
        "part01_tokenizer",
        question="How fast does the tokenizer read text, and what did each idea buy?",
        workload={
            "text": arguments.text.name,
            "learned_from": arguments.learned_from.name,
            "model": MODEL,
            "repeats": arguments.repeats,
            "statistic": "median",
        },
        figures={"text": text_figures, "long_word": long_word_figures, "dictionary": dictionary_figures},
        tables={"speed": speed, "long_word": long_word},
    )

    show(path, {"Text": speed, "One long word": long_word})


if __name__ == "__main__":
    main()
