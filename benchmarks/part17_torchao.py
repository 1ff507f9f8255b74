"""The same weights quantized by torchao: how wrong are the layers, and how fast, on a CPU?

    pip install torchao==0.18.0       # for this benchmark alone
    python -m benchmarks.part17_torchao

A layer of GPT-2 124M's shape (768 to 3,072), random weights, one row and 16. torchao: int8 weight-only,
and int8 with dynamic activations. Error: of the output, relative to fp32's, by norms.
"""

import time
from collections.abc import Callable
from importlib.metadata import version

import torch
from torch import Tensor, nn

from benchmarks.record import record
from engine.quantization.layers import LINEARS

IN, OUT, ROWS, ROUNDS = 768, 3072, (1, 16), 30


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


@torch.inference_mode()
def main() -> None:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig

    torch.manual_seed(0)
    linear = nn.Linear(IN, OUT).requires_grad_(False)
    sides = {"fp32": linear}
    sides |= {f"this engine, {method}": ours(linear, method) for method in LINEARS}
    sides["torchao, int8 weight-only"] = theirs(linear, Int8WeightOnlyConfig)
    sides["torchao, int8 dynamic"] = theirs(linear, Int8DynamicActivationInt8WeightConfig)
    rows = []
    for count in ROWS:
        x = torch.randn(count, IN)
        want = linear(x)
        best: dict[str, float] = dict.fromkeys(sides, float("inf"))
        for _ in range(ROUNDS):
            for name, layer in sides.items():
                best[name] = min(best[name], _seconds(layer, x))
        for name, layer in sides.items():
            error = float((layer(x) - want).norm() / want.norm())
            rows.append([name, count, best[name] * 1e6, best["fp32"] / best[name], error])
            print(*rows[-1], sep="  ", flush=True)
    record(
        "part17_torchao",
        "The same weights quantized by torchao: how wrong are the layers, and how fast, on a CPU?",
        {"in": IN, "out": OUT, "rows": ROWS, "rounds": ROUNDS, "torchao": version("torchao")},
        {},
        {"sides": {"columns": ["side", "rows", "µs", "× fp32", "relative error"], "rows": rows}},
    )


def _seconds(layer: nn.Module, x: Tensor) -> float:
    start = time.perf_counter()
    layer(x)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
