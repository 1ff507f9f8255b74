"""What do the knobs do: how many tokens stay possible, how much repeats itself, how many words exist nowhere?

    python -m benchmarks.part05_knobs [--stories 6] [--words FILE]

`kept`: the tokens that each fence leaves, at two temperatures, after a text whose next word is all but
certain and after one where many would do. `text`: every setting tells the same number of stories, each
prompt with each seed. Counted are the share of four-word runs that stood in the same story before, and the
words that the training text does not have. No times: these figures are the same on any machine, but for
rounding.
"""

import argparse
import re
from pathlib import Path

import torch

from benchmarks.record import DATA, corpus, record, show
from engine.cache.single import CachedForward
from engine.decoding.greedy import decode_steps
from engine.decoding.params import SamplingParams
from engine.decoding.sampling import SUPPORTS, distribution, sampler
from engine.decoding.sampling_state import SamplingState
from engine.models.loader import load_model
from engine.text.tokenizer import Tokenizer

MODEL = "storyteller"
TOKENS = 120
RUN = 4  # words
PROMPTS = (
    "One day, a little fox found a",
    "In the garden, there was a small",
    "Lily opened the box and found a",
    "Once upon a time, there was a robot",
)
SETTINGS = {
    "greedy": {"temperature": 0},
    "greedy, frequency penalty 0.5": {"temperature": 0, "frequency_penalty": 0.5},
    "temperature 0.7": {"temperature": 0.7},
    "temperature 1": {"temperature": 1.0},
    "temperature 1, top-k 40": {"temperature": 1.0, "top_k": 40},
    "temperature 1, top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "temperature 1, min-p 0.1": {"temperature": 1.0, "min_p": 0.1},
    "temperature 1.5": {"temperature": 1.5},
    "temperature 1.5, top-k 40": {"temperature": 1.5, "top_k": 40},
    "temperature 1.5, top-p 0.9": {"temperature": 1.5, "top_p": 0.9},
    "temperature 1.5, min-p 0.1": {"temperature": 1.5, "min_p": 0.1},
}
SURE, UNSURE = "Once upon a", "In the garden, there was a tiny"
FENCES = {"top-k 40": {"top_k": 40}, "top-p 0.9": {"top_p": 0.9}, "min-p 0.1": {"min_p": 0.1}}


def kept(model: torch.nn.Module, tokenizer: Tokenizer) -> tuple[dict, list[list]]:
    """How many tokens each fence keeps, and the same as rows of a table."""
    figures, rows = {}, []
    for key, prompt in (("sure", SURE), ("unsure", UNSURE)):
        logits = CachedForward(model)(tokenizer.encode(prompt))  # [V]
        figures[key] = {"favourite": float(logits.softmax(-1).max())}
        for temperature in (1.0, 1.5):
            params = [SamplingParams(temperature=temperature, **fence) for fence in FENCES.values()]
            probs = distribution(
                logits.expand(len(params), -1), [SamplingState(p, [], [], 0) for p in params]
            )  # [R, V]
            counts = (probs > 0).sum(-1).tolist()
            figures[key][f"{temperature:g}"] = dict(zip(("top_k", "top_p", "min_p"), counts, strict=True))
            rows.append([f"{prompt} …", f"{temperature:g}", *counts])
    return figures, rows


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z]+(?:'[a-z]+)?", text.lower())


def repeated(words: list[str]) -> tuple[int, int]:
    """(runs of RUN words that stood in this story before, runs in all)."""
    runs = [tuple(words[i : i + RUN]) for i in range(len(words) - RUN + 1)]
    return len(runs) - len(set(runs)), len(runs)


def tell(model: torch.nn.Module, tokenizer: Tokenizer, prompt: str, params: SamplingParams) -> str:
    ids = tokenizer.encode(prompt)
    choose = sampler(params, ids)
    steps = decode_steps(CachedForward(model), tokenizer, model.config, ids, params, choose, SUPPORTS)
    last = list(steps)[-1]
    text = last.output.text
    return text.rpartition(" ")[0] if last.finish_reason == "length" else text  # the last word may be cut


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stories", type=int, default=6, help="per prompt and setting; seeds 0, 1, ...")
    parser.add_argument(
        "--words", type=Path, default=DATA / "stories_train.txt", help="the text whose words count as words"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    known = set(words_of(corpus(arguments.words)))
    tokenizer, model = Tokenizer.from_pretrained(MODEL), load_model(MODEL)

    kept_figures, kept_rows = kept(model, tokenizer)
    figures: dict = {"kept": kept_figures, "text": {}}
    rows = []
    for name, setting in SETTINGS.items():
        texts = []
        for prompt in PROMPTS:
            for seed in range(arguments.stories if setting["temperature"] else 1):
                params = SamplingParams(max_tokens=TOKENS, seed=seed, **setting)
                texts.append(tell(model, tokenizer, prompt, params))
        stories = [words_of(text) for text in texts]
        again, runs = (sum(counts) for counts in zip(*map(repeated, stories), strict=True))
        count = sum(map(len, stories))
        strange = sum(word not in known for story in stories for word in story)
        figures["text"][name] = {"repeats": again / runs, "unknown_per_hundred": 100 * strange / count}
        rows.append([name, len(stories), f"{again / runs:.1%}", f"{100 * strange / count:.1f}"])
    left = {"columns": ["after", "temperature", *FENCES], "rows": kept_rows}
    text = {
        "columns": ["setting", "stories", f"runs of {RUN} words told before", "unknown words in 100"],
        "rows": rows,
    }
    workload = {
        "model": MODEL, "prompts": PROMPTS, "tokens": TOKENS, "stories": arguments.stories,
        "known_words": len(known),
    }  # fmt: skip
    tables = {"kept": left, "text": text}
    path = record(
        "part05_knobs", "What do the knobs do to the next token, and to the text?", workload, figures,
        tables,
    )  # fmt: skip
    show(path, tables)


if __name__ == "__main__":
    main()
