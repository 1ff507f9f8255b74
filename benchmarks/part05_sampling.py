"""What does it cost to choose a token: by the maximum, by our sampler, by Hugging Face's processors?

    python -m benchmarks.part05_sampling [--repeats 15] [--threads 1]

Two vocabularies (storyteller's 4,096 and GPT-2's 50,257), three batch sizes R, random logits. `cost`: median
microseconds per row of each way to choose. `step`: one row beside one step of storyteller's forward, its
weights packed as in the demo and in Part 6. `sort`: ways to put one row's logits in order, which top-p cannot
do without. The sides take turns in one run. Before anything is timed, our probabilities are compared with
Hugging Face's.
"""

import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model is in the repository

import numpy as np
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from benchmarks.record import middle, quartiles, record, show, whole_numbers
from engine.cache.single import CachedForward
from engine.decoding.params import SamplingParams
from engine.decoding.sampling import distribution, sample
from engine.decoding.sampling_state import SamplingState
from engine.layers.packed_linear import pack_linears
from engine.models.loader import load_model

VOCABULARIES = (4096, 50257)
BATCHES = (1, 8, 32)
GREEDY, HOT, KNOBS, ALL = "argmax", "temperature", "top-k, top-p", "all knobs"
HF, HF_ROWS = "HF top-k, top-p", "HF, row by row"
KEYS = {GREEDY: "argmax", HOT: "temperature", KNOBS: "fences", ALL: "all", HF: "hf", HF_ROWS: "hf_rows"}
SETTINGS = {
    GREEDY: {"temperature": 0},
    HOT: {"temperature": 0.8},
    KNOBS: {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    ALL: {
        "temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.1,
        "frequency_penalty": 0.2, "presence_penalty": 0.2, "logit_bias": {7: -100.0},
    },
}  # fmt: skip


def rows_of(setting: dict, R: int, V: int) -> list[SamplingState]:
    """R requests in mid-story: 16 prompt tokens, 64 output tokens, a seed each."""
    params = SamplingParams(**setting)
    ids = torch.randint(V, (R, 80), generator=torch.Generator().manual_seed(1)).tolist()
    return [SamplingState(params, row[:16], row[16:], seed) for seed, row in enumerate(ids)]


def ours(setting: dict, logits: Tensor) -> Callable[[], Tensor]:
    rows = rows_of(setting, *logits.shape)
    return lambda: sample(logits, rows)


def warpers(setting: dict) -> LogitsProcessorList:
    return LogitsProcessorList(
        [
            TemperatureLogitsWarper(setting["temperature"]),
            TopKLogitsWarper(setting["top_k"]),
            TopPLogitsWarper(setting["top_p"]),
        ]
    )


def theirs(setting: dict, logits: Tensor) -> Callable[[], Tensor]:
    """As `generate(do_sample=True)` does it: all rows with the same parameters and the same generator."""
    chain, ids = warpers(setting), torch.zeros(len(logits), 80, dtype=torch.long)
    return lambda: torch.multinomial(chain(ids, logits).softmax(-1), 1)


def theirs_row_by_row(setting: dict, logits: Tensor) -> Callable[[], Tensor]:
    """What unlike rows need of it: a call for each, with a chain and a generator of its own."""
    chains, ids = [warpers(setting) for _ in logits], torch.zeros(1, 80, dtype=torch.long)
    dice = [torch.Generator().manual_seed(seed) for seed in range(len(logits))]

    def choose() -> Tensor:
        return torch.cat(
            [
                torch.multinomial(chain(ids, row[None]).softmax(-1), 1, generator=generator)
                for row, chain, generator in zip(logits, chains, dice, strict=True)
            ]
        )

    return choose


@torch.inference_mode()
def measure(V: int, R: int, repeats: int) -> dict[str, list[float]]:
    """Microseconds per row of each round, by side."""
    logits = torch.randn(R, V, generator=torch.Generator().manual_seed(0)) * 3  # [R, V]
    expected = warpers(SETTINGS[KNOBS])(torch.zeros(R, 80, dtype=torch.long), logits).softmax(-1)
    difference = (distribution(logits, rows_of(SETTINGS[KNOBS], R, V)) - expected).abs().max()
    assert difference < 1e-6, "the sides disagree"
    sides = {name: ours(setting, logits) for name, setting in SETTINGS.items()}
    sides[HF] = theirs(SETTINGS[KNOBS], logits)
    sides[HF_ROWS] = theirs_row_by_row(SETTINGS[KNOBS], logits)
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(repeats + 1):
        for name, choose in sides.items():
            start = time.perf_counter()
            choose()
            if turn:  # the first is a warm-up
                taken[name].append((time.perf_counter() - start) * 1e6 / R)
    return taken


def measure_sort(V: int, repeats: int) -> dict[str, list[float]]:
    """Microseconds to order one row, of each round."""
    logits = torch.randn(1, V, generator=torch.Generator().manual_seed(0)) * 3  # [1, V]
    sides = {
        "torch.sort": lambda: logits.sort(dim=-1),
        "np.sort": lambda: np.sort(logits.numpy(), axis=-1),
        "topk(50)": lambda: logits.topk(50, dim=-1),
        "softmax": lambda: logits.softmax(-1),
    }
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, order in sides.items():
            start = time.perf_counter()
            order()
            taken[name].append((time.perf_counter() - start) * 1e6)
    return taken


def forward_us(repeats: int) -> list[float]:
    """Microseconds of each of so many decoding steps of storyteller, packed, after 64 tokens."""
    forward = CachedForward(load_model("storyteller", transform=pack_linears))
    ids, taken = [5] * 64, []
    forward(ids)
    for _ in range(repeats):
        ids.append(5)
        start = time.perf_counter()
        forward(ids)
        taken.append((time.perf_counter() - start) * 1e6)
    return taken


def medians(taken: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(times) for name, times in taken.items()}


def main() -> None:
    arguments = whole_numbers(__doc__.splitlines()[0], repeats=15, threads=1)
    torch.set_num_threads(arguments.threads)

    taken = {(V, R): measure(V, R, arguments.repeats) for V in VOCABULARIES for R in BATCHES}
    measured = {size: medians(by_side) for size, by_side in taken.items()}
    names = [*SETTINGS, HF, HF_ROWS]
    cost = {
        "columns": ["V", "R", *(f"{name}, µs" for name in names)],
        "rows": [[V, R, *(middle(us[name]) for name in names)] for (V, R), us in taken.items()],
    }
    passes, small = forward_us(max(30, arguments.repeats)), measured[VOCABULARIES[0], 1]
    forward, of_one_row = statistics.median(passes), taken[VOCABULARIES[0], 1]
    step = {
        "columns": ["choice", "µs for one token", "share of forward + choice"],
        "rows": [
            [name, middle(of_one_row[name]), f"{small[name] / (forward + small[name]):.1%}"]
            for name in SETTINGS
        ],
    }
    in_order = {V: measure_sort(V, arguments.repeats) for V in VOCABULARIES}
    orders = {V: medians(by_way) for V, by_way in in_order.items()}
    sort = {
        "columns": ["for one row", *(f"V = {V:,}, µs" for V in VOCABULARIES)],
        "rows": [
            [name, *(middle(in_order[V][name]) for V in VOCABULARIES)] for name in orders[VOCABULARIES[0]]
        ],
    }
    many, large = measured[VOCABULARIES[0], BATCHES[-1]], measured[VOCABULARIES[1], BATCHES[-1]]
    figures = {
        "forward_us": forward,
        "share_of_step": {KEYS[name]: small[name] / (forward + small[name]) for name in SETTINGS},
        "knobs_over_argmax": small[KNOBS] / small[GREEDY],
        "hf_over_ours_one_row": small[HF] / small[KNOBS],
        "hf_row_by_row_over_ours": many[HF_ROWS] / many[KNOBS],
        "hf_row_by_row_over_ours_large": large[HF_ROWS] / large[KNOBS],
        "torch_sort_us": orders[VOCABULARIES[1]]["torch.sort"],
        "np_sort_us": orders[VOCABULARIES[1]]["np.sort"],
        "torch_sort_over_np_sort": orders[VOCABULARIES[1]]["torch.sort"] / orders[VOCABULARIES[1]]["np.sort"],
        "torch_sort_over_forward": orders[VOCABULARIES[1]]["torch.sort"] / forward,
        "one_row_us": {KEYS[name]: us for name, us in small.items()},
        "many_rows_us": {KEYS[name]: us for name, us in many.items()},
        "many_rows_large_us": {KEYS[name]: us for name, us in large.items()},
        "rounds": {
            "forward_us": quartiles(passes),
            "one_row_us": {KEYS[name]: quartiles(us) for name, us in of_one_row.items()},
        },
    }
    workload = {
        "logits": "normal, scale 3", "settings": SETTINGS, "tokens_so_far": 80, "dtype": "float32",
        "repeats": arguments.repeats, "statistic": "median",
    }  # fmt: skip
    path = record(
        "part05_sampling", "What does it cost to choose a token?", workload, figures,
        {"cost": cost, "step": step, "sort": sort},
    )  # fmt: skip

    show(
        path,
        {
            "Microseconds per row": cost,
            f"Beside {forward:.0f} µs of forward": step,
            "Putting a row in order": sort,
        },
    )


if __name__ == "__main__":
    main()
