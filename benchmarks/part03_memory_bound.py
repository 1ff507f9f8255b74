"""What does a decode step wait for: bytes, arithmetic, or the calls themselves?

    python -m benchmarks.part03_memory_bound                 # a minute or two, on a quiet machine
    python -m benchmarks.part03_memory_bound --rounds 2 --models storyteller

Three tests of "it waits for its weights". A step of 8 tokens does eight times the arithmetic on the same
bytes: if reading decides, it costs hardly more. A bare read of the same bytes (torch.sum) is a floor. And a
model too large for the processor's caches must be slower per byte. What is left is split: linear layers that
compute nothing leave the rest of the step, and linear layers of a few numbers leave the cost of a call.

The sides take turns in every round, and in a round the fastest of REPEATS runs counts. Figures are medians of
the rounds; `spread` has the least and the most of each.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch
from rich import print
from rich.table import Table
from torch import Tensor, nn

from benchmarks.record import record, spread
from engine.cache.single import SingleCache
from engine.layers.packed_linear import FORMS, pack_linears
from engine.layers.replace import linear_names, replace_linears
from engine.models.loader import load_model

CONTEXT = 64  # tokens in the cache
REPEATS = 8  # of each side in a round
TOKENS = (1, 8)  # in a step
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 50257,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_positions": 1024,
}
NAMES = {"storyteller": "storyteller", "gpt2-shape": "GPT-2's shape"}


class Nothing(nn.Module):
    """A linear layer without arithmetic: its answer is always there."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.answers = {rows: torch.zeros(rows, linear.out_features) for rows in TOKENS}

    def __call__(self, x: Tensor) -> Tensor:
        return self.answers[len(x)]


def load(name: str, form: type[nn.Module] | None) -> nn.Module:
    """The model with all linear layers in one form; its weights fit into fp16, so each form is exact."""
    if name == "gpt2-shape":
        folder = Path(tempfile.mkdtemp())
        (folder / "config.json").write_text(json.dumps(GPT2))
        model = load_model(folder, load_format="dummy")
        for layer in linear_names(model):
            weight = model.get_submodule(layer).weight
            weight.copy_(weight.half())
    else:
        model = load_model(name)
    return replace_linears(model, lambda _, linear: form(linear)) if form else model


def step(model: nn.Module, tokens: int) -> Callable[[], Tensor]:
    """A step of `tokens` tokens behind CONTEXT others, with the logits of the last."""
    cache = SingleCache(model.config, CONTEXT + tokens)
    cache.keys.normal_(), cache.values.normal_()
    cache.advance(CONTEXT)
    ids, positions = torch.arange(1, tokens + 1), torch.arange(CONTEXT, CONTEXT + tokens)

    def run() -> Tensor:
        return model.logits(model(ids, positions, cache.attend)[-1:])

    return run


@torch.inference_mode()
def fastest(sides: dict[tuple, Callable[[], object]], rounds: int) -> dict[tuple, list[float]]:
    """Milliseconds of each side in each round, the sides in turns."""
    found: dict[tuple, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, run in sides.items():
            run()  # what the side before left in the caches is not its fault
            taken = []
            for _ in range(REPEATS):
                start = time.perf_counter()
                run()
                taken.append((time.perf_counter() - start) * 1e3)
            found[name].append(min(taken))
    return found


def measure(name: str, rounds: int) -> dict:
    plain = load(name, None)
    linears = [plain.get_submodule(layer) for layer in linear_names(plain)]
    weights = [linear.weight for linear in linears]
    forms = [form for form in FORMS if all(map(form.can_pack, linears))]
    models = {"nn.Linear": plain, **{form.__name__: load(name, form) for form in forms}}
    models["nothing"] = load(name, Nothing)
    models["pack_linears"] = pack_linears(load(name, None))  # of these forms, the fastest for each shape
    steps = {(side, T): step(model, T) for (side, model), T in product(models.items(), TOKENS)}
    # The layers alone, one after the other, as they are read within a step; and layers of 8 x 8 numbers.
    inputs = [torch.ones(1, linear.in_features) for linear in linears]
    tiny, small = torch.ones(1, 8), nn.Linear(8, 8).requires_grad_(False)
    small.weight.copy_(small.weight.half())
    for side, form in {"nn.Linear": None, **{form.__name__: form for form in forms}}.items():
        own = [models[side].get_submodule(layer) for layer in linear_names(plain)]
        short = form(small) if form else small
        steps[side, "layers"] = lambda own=own: [layer(x) for layer, x in zip(own, inputs, strict=True)]
        steps[side, "calls"] = lambda short=short: [short(tiny) for _ in linears]
    steps["bare read", "fp32"] = lambda: [weight.sum() for weight in weights]
    steps["bare read", "fp16"] = lambda: [
        weight[: len(weight) // 2].sum() for weight in weights
    ]  # half the bytes
    taken = fastest(steps, rounds)
    ms = {key: statistics.median(times) for key, times in taken.items()}
    megabytes = sum(weight.nbytes for weight in weights) / 1e6
    found = {
        side: {
            "step_ms": ms[side, 1],
            "step_spread": spread(taken[side, 1]),
            "step_of_8_ms": ms[side, 8],
            "eight_times_the_arithmetic": ms[side, 8] / ms[side, 1],
            "layers_ms": ms[side, "layers"],
            "layers_spread": spread(taken[side, "layers"]),
            "calls_ms": ms[side, "calls"],
            "megabytes": megabytes / 2 if "Half" in side else megabytes,
        }
        for side in models
        if side not in ("nothing", "pack_linears")
    }
    bare = {kind: ms["bare read", kind] for kind in ("fp32", "fp16")}
    fp32 = min(value["layers_ms"] for side, value in found.items() if "Half" not in side)
    split = {
        "layers_plain_ms": found["nn.Linear"]["layers_ms"],
        "layers_best_fp32_ms": fp32,  # the same bytes, another kernel
        "layers_half_ms": found.get("Half", {}).get("layers_ms"),  # half the bytes, and another kernel again
        "by_kernel_ms": found["nn.Linear"]["layers_ms"] - fp32,
        "bytes_could_save_ms": bare["fp32"] - bare["fp16"],
    }
    plain_ms = found["nn.Linear"]["step_ms"]
    ratios = {
        "layers_over_bare_read": split["layers_plain_ms"] / bare["fp32"],
        "bare_read_of_a_step": bare["fp32"] / plain_ms,
        "layers_of_a_step": split["layers_plain_ms"] / plain_ms,
        "eight_tokens_over_one": found["nn.Linear"]["eight_times_the_arithmetic"],
        "gain_if_bytes_alone": 1 / (1 - bare["fp32"] / plain_ms / 2),  # half the bytes read in half the time
    }
    if "Half" in found:
        ratios["half_of_plain_layers"] = found["Half"]["layers_ms"] / split["layers_plain_ms"]
        ratios["gain_of_half"] = plain_ms / found["Half"]["step_ms"]
    ratios["gain_of_pack_linears"] = plain_ms / ms["pack_linears", 1]
    return {
        "ratios": ratios,
        "forms": found,
        "bare_read_ms": bare,
        "bare_read_spread": spread(taken["bare read", "fp32"]),
        "step_ms": plain_ms,
        "step_of_pack_linears_spread": spread(taken["pack_linears", 1]),
        "read_share_of_each_round": [
            read / whole
            for read, whole in zip(taken["bare read", "fp32"], taken["nn.Linear", 1], strict=True)
        ],
        "gigabytes_per_second": {"bare read": megabytes / bare["fp32"]}
        | {side: value["megabytes"] / value["layers_ms"] for side, value in found.items()},
        "rest_of_the_step_ms": ms["nothing", 1],
        "split": split,
        "num_linears": len(linears),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    figures: dict = {"context": CONTEXT}
    rows = []
    for threads in args.threads:
        torch.set_num_threads(threads)
        for name in args.models:
            found = figures.setdefault(name.replace("-", "_"), {})[f"threads_{threads}"] = measure(
                name, args.rounds
            )
            for side, ms in found["forms"].items():
                steps = ("step_ms", "step_spread", "step_of_8_ms")
                keys = ("megabytes", *steps, "layers_ms", "layers_spread", "calls_ms")
                numbers = [ms[key] for key in keys]
                rows.append([NAMES[name], threads, f"`{side}`", *numbers])
            rest = found["rest_of_the_step_ms"]
            rows.append([NAMES[name], threads, "no linear layers", 0, rest, "", None, 0, "", 0])
            bare, read_spread = found["bare_read_ms"]["fp32"], found["bare_read_spread"]
            megabytes = found["forms"]["nn.Linear"]["megabytes"]
            rows.append(
                [NAMES[name], threads, "a bare read", megabytes, None, "", None, bare, read_spread, 0]
            )
    columns = [
        "model",
        "threads",
        "linear layers",
        "MB",
        "step, ms",
        "steps, in rounds",
        "step of 8 tokens, ms",
        "layers alone, ms",
        "of them, in rounds",
    ]
    columns += ["of that, calls, ms"]
    shown = Table(*columns, title=f"a decode step behind {CONTEXT} tokens")
    for row in rows:
        shown.add_row(*("" if x is None else f"{x:.2f}" if isinstance(x, float) else str(x) for x in row))
    print(shown)
    workload = {
        "models": args.models,
        "context": CONTEXT,
        "rounds": args.rounds,
        "repeats": REPEATS,
        "torch_threads": args.threads,
    }
    question = "What does a decode step wait for: bytes, arithmetic, or the calls themselves?"
    print(
        record(
            "part03_memory_bound",
            question,
            workload,
            figures,
            {"steps": {"columns": columns, "rows": rows}},
        )
    )


if __name__ == "__main__":
    main()
