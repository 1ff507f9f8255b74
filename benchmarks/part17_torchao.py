"""The same weights quantized by torchao: how wrong are the layers, and how fast, on a CPU?

    pip install torchao==0.18.0       # for this benchmark alone
    python -m benchmarks.part17_torchao

A layer of GPT-2 124M's shape (768 to 3,072), random weights, one row and 16. torchao: int8 weight-only,
and int8 with dynamic activations. Error: of the output, relative to fp32's, by norms. The sides take turns:
in each round a side runs CALLS times, and its time is their mean.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version

import torch
from torch import Tensor, nn

from benchmarks.record import middle, quartiles, record, show, whole_numbers
from benchmarks.workloads import ratios, rounds
from engine.quantization.layers import LINEARS

IN, OUT, ROWS, CALLS = 768, 3072, (1, 16), 20
QUESTION = __doc__.splitlines()[0]


def ours(linear: nn.Linear, method: str) -> nn.Module:
    layer = LINEARS[method](IN, OUT, torch.device("cpu"), torch.float32, group_size=64)
    layer.set_weight(linear.weight, linear.bias)
    layer.pack()
    return layer


def theirs(linear: nn.Linear, config: Callable) -> nn.Module:
    from copy import deepcopy

    from torchao.quantization import quantize_

    model = nn.Sequential(deepcopy(linear))
    quantize_(model, config())
    return model


def seconds(layer: nn.Module, x: Tensor) -> float:
    """Of one call, as the mean of CALLS."""
    start = time.perf_counter()
    for _ in range(CALLS):
        layer(x)
    return (time.perf_counter() - start) / CALLS


@torch.inference_mode()
def main() -> None:
    options = whole_numbers(QUESTION, repeats=7)
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig

    torch.set_num_threads(1)
    torch.manual_seed(0)
    linear = nn.Linear(IN, OUT).requires_grad_(False)
    layers = {"fp32": linear}
    layers |= {f"this engine, {method}": ours(linear, method) for method in LINEARS}
    layers["torchao, int8 weight-only"] = theirs(linear, Int8WeightOnlyConfig)
    layers["torchao, int8 dynamic"] = theirs(linear, Int8DynamicActivationInt8WeightConfig)
    rows, in_rounds = [], {}
    for count in ROWS:
        x = torch.randn(count, IN)
        want = linear(x)
        sides = {name: partial(seconds, layer, x) for name, layer in layers.items()}
        rounds(sides, 1)  # warm
        taken = rounds(sides, options.repeats)
        us = {name: [time * 1e6 for time in times] for name, times in taken.items()}
        faster = {name: [1 / ratio for ratio in of] for name, of in ratios(taken, "fp32").items()}
        for name, layer in layers.items():
            error = float((layer(x) - want).norm() / want.norm())
            rows.append([name, count, middle(us[name]), statistics.median(faster[name]), error])
        in_rounds[f"rows_{count}"] = {
            "us": {name: quartiles(values) for name, values in us.items()},
            "times_fp32": {name: quartiles(values) for name, values in faster.items()},
        }
    workload = {
        "in": IN, "out": OUT, "rows": ROWS, "rounds": options.repeats, "calls_in_a_round": CALLS,
        "torch_threads": 1, "torchao": version("torchao"),
    }  # fmt: skip
    tables = {"sides": {"columns": ["side", "rows", "µs", "× fp32", "relative error"], "rows": rows}}
    show(record("part17_torchao", QUESTION, workload, {"rounds": in_rounds}, tables), tables)


if __name__ == "__main__":
    main()
