"""What does a token cost when the whole sequence is computed anew for each one?

    python -m benchmarks.part02_growth [--tokens 256] [--repeats 5] [--threads 1]

Three tables from one run. `growth`: one step of the loop at several lengths, and how much of it is attention:
the model is handed an `attend` with a clock. `story`: the work and the time of one long generation, as it
grows. `sides`: the same generation by this loop and by Hugging Face, without and with its cache. Lengths and
sides take turns. A step is the fastest of its rounds, a generation the median, and every side's tokens are
compared.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model is in the repository

import torch
import transformers
from torch import Tensor, nn

from benchmarks.record import quartiles, record, show, spread
from engine.attention.dense import causal
from engine.decoding.greedy import Forward, FullForward, generate
from engine.decoding.params import SamplingParams
from engine.models.checkpoint import resolve
from engine.models.loader import load_model
from engine.text.tokenizer import Tokenizer

MODEL = "storyteller"
STEP_ROUNDS = 9
PROMPT = "Once upon a time"
LENGTHS = (64, *range(100, 1001, 100))  # tokens in the sequence when one more is asked for
BASE, MIDDLE, LONGEST = 100, 500, 1000  # of them, those the figures name
NAMED = {"base": BASE, "middle": MIDDLE, "longest": LONGEST}
ALL_ROWS, LAST_ROW = "this loop, logits for every row", "this loop (FullForward)"
HF_FULL, HF_CACHE = "Hugging Face, use_cache=False", "Hugging Face, with its cache"


def every_row(model: nn.Module) -> Forward:
    """FullForward as one writes it first: logits for all T rows, of which all but one are thrown away."""

    @torch.inference_mode()
    def forward(token_ids: list[int]) -> Tensor:
        tokens = torch.tensor(token_ids)  # [T]
        hidden = model(tokens, torch.arange(len(tokens)), causal)  # [T, D]
        return model.logits(hidden)[-1]  # [T, V] -> [V]

    return forward


def ours(forward: Forward, tokenizer: Tokenizer, config) -> Callable[[list[int], int], tuple[list, list]]:
    """(prompt, new tokens) -> their ids, and the seconds after which each was known."""

    def run(prompt: list[int], tokens: int) -> tuple[list[int], list[float]]:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        done = generate(forward, tokenizer, config, prompt, params)
        return done.outputs[0].token_ids, [moment - done.stats.arrival for moment in done.stats.token_times]

    return run


def theirs(model: nn.Module, use_cache: bool) -> Callable[[list[int], int], tuple[list, list]]:
    """The same by `generate`, which only tells when it is done."""

    def run(prompt: list[int], tokens: int) -> tuple[list[int], list[float]]:
        ids = torch.tensor([prompt])
        start = time.perf_counter()
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens,
            use_cache=use_cache,
        )  # fmt: skip
        return out[0, len(prompt) :].tolist(), [time.perf_counter() - start]

    return run


class Clocked:
    """FullForward with a clock around attention, where a token's work grows with the length."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.attention = model, 0.0  # seconds

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        start = time.perf_counter()
        out = causal(layer, q, k, v)
        self.attention += time.perf_counter() - start
        return out

    @torch.inference_mode()
    def __call__(self, token_ids: list[int]) -> Tensor:
        tokens = torch.tensor(token_ids)  # [T]
        hidden = self.model(tokens, torch.arange(len(tokens)), self.attend)  # [T, D]
        return self.model.logits(hidden[-1:])[0]  # [V]


def measure_growth(model: nn.Module) -> dict[str, list]:
    """Milliseconds of the fastest step of STEP_ROUNDS, by length: all of it, attention, everything else."""
    step = Clocked(model)
    taken: dict[int, list[tuple[float, float]]] = {length: [] for length in LENGTHS}
    for _ in range(STEP_ROUNDS):
        for length in LENGTHS:
            ids = [i % model.config.vocab_size for i in range(length)]  # the values do not change the work
            step.attention, start = 0.0, time.perf_counter()
            step(ids)
            taken[length].append(((time.perf_counter() - start) * 1e3, step.attention * 1e3))
    rows = []
    for length, times in taken.items():
        whole, attention = min(times)  # one run, so that its parts add up
        in_rounds = spread([ms for ms, _ in times])
        rows.append([length, whole, attention, whole - attention, f"{attention / whole:.0%}", in_rounds])
    return {
        "columns": [
            "tokens so far",
            "ms per token",
            "attention",
            "all else",
            "attention's share",
            "in rounds",
        ],
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=256, help="new tokens in the comparison")
    parser.add_argument("--repeats", type=int, default=5, help="of the generations")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()

    folder, tokens = resolve(MODEL), arguments.tokens
    tokenizer, model = Tokenizer.from_pretrained(folder), load_model(folder)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reference.generation_config.eos_token_id = None  # run on past the end of the story, as ours does
    prompt = tokenizer.encode(PROMPT)
    growth = measure_growth(model)

    sides = {
        HF_FULL: theirs(reference, use_cache=False),
        ALL_ROWS: ours(every_row(model), tokenizer, model.config),
        LAST_ROW: ours(FullForward(model), tokenizer, model.config),
        HF_CACHE: theirs(reference, use_cache=True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    long_runs: list[list[float]] = []
    for _ in range(arguments.repeats):
        answers = []
        for name, run in sides.items():
            # Ours goes on to twice the length, for the `story` table; its first half is the comparison.
            ids, moments = run(prompt, 2 * tokens if name == LAST_ROW else tokens)
            answers.append(ids[:tokens])
            seconds[name].append(moments[min(tokens, len(moments)) - 1])
            if name == LAST_ROW:
                long_runs.append(moments)
        assert all(ids == answers[0] for ids in answers), "the sides disagree"

    medians = {name: statistics.median(times) for name, times in seconds.items()}
    story = {
        "columns": [
            "new tokens",
            "tokens computed",
            "of them computed before",
            "seconds",
            "tokens/s",
            "seconds in rounds",
        ],
        "rows": [],
    }
    for count in (tokens // 4, tokens // 2, tokens, 2 * tokens):
        computed = sum(len(prompt) + i for i in range(count))  # every step runs the whole sequence
        needed = len(prompt) + count - 1  # each token once; the last one is never fed back
        times = [moments[count - 1] for moments in long_runs]
        taken = statistics.median(times)
        share = f"{(computed - needed) / computed:.1%}"
        story["rows"].append([count, computed, share, taken, count / taken, spread(times)])
    compared = {
        "columns": ["side", "seconds", "in rounds", "tokens/s", "speed against this loop"],
        "rows": [
            [name, t, spread(seconds[name]), tokens / t, f"{medians[LAST_ROW] / t:.2f} ×"]
            for name, t in medians.items()
        ],
    }

    steps = {row[0]: row[1:4] for row in growth["rows"]}  # length -> ms: all of it, attention, all else
    in_comparison = story["rows"][2]
    figures = {
        "base": BASE,
        "middle": MIDDLE,
        "longest": LONGEST,
        "times_longer": LONGEST / BASE,
        "ms": {name: steps[length][0] for name, length in NAMED.items()},
        "attention_share": {name: steps[length][1] / steps[length][0] for name, length in NAMED.items()},
        "growth": {
            part: steps[LONGEST][i] / steps[BASE][i]
            for i, part in enumerate(("all", "attention", "all_else"))
        },
        "rounds_seconds": {name: quartiles(times) for name, times in seconds.items()},
        "new_tokens": tokens,
        "tokens_computed": in_comparison[1],
        "tokens_needed": len(prompt) + tokens - 1,
        "times_too_many": in_comparison[1] / (len(prompt) + tokens - 1),
        "tokens_per_second": tokens / medians[LAST_ROW],
        "tokens_per_second_twice_as_long": story["rows"][3][4],
        "last_row_saves": 1 - medians[LAST_ROW] / medians[ALL_ROWS],
        "over_hf_without_cache": medians[HF_FULL] / medians[LAST_ROW],
        "hf_cache_over_ours": medians[LAST_ROW] / medians[HF_CACHE],
    }
    workload = {
        "model": MODEL, "prompt": PROMPT, "prompt_tokens": len(prompt), "new_tokens": tokens, "greedy": True,
        "eos": "ignored", "dtype": "float32",
        "repeats": {"step": STEP_ROUNDS, "generation": arguments.repeats},
        "statistic": {"step": "fastest", "generation": "median"},
    }  # fmt: skip
    path = record(
        "part02_growth", "What does a token cost when the whole sequence is computed anew for each one?",
        workload, figures, {"growth": growth, "story": story, "sides": compared}
    )  # fmt: skip

    show(path, {"One step": growth, "One story": story, f"{tokens} tokens": compared})


if __name__ == "__main__":
    main()
