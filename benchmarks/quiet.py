"""Is this machine quiet enough to record a measurement? A fixed piece of work, timed before and after.

before = yardstick()
...                                          # measure, in rounds
refuse_noise(before, yardstick(), rounds)    # ends the program where they disagree
"""

import statistics
import time

import torch

AGREE = 1.1  # the most by which two readings of the same quantity may differ, as a factor
NUMBERS = 2**24  # fp32: 64 MiB, more than a processor's caches hold


def yardstick() -> float:
    """Milliseconds of one bare read of 64 MiB on one thread: the median of 15."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    numbers, times = torch.ones(NUMBERS), []
    for _ in range(15):
        start = time.perf_counter()
        numbers.sum()
        times.append((time.perf_counter() - start) * 1e3)
    torch.set_num_threads(threads)
    return statistics.median(times)


def refuse_noise(before: float, after: float, rounds: dict[str, list[float]]) -> None:
    """End the program, so that nothing is recorded, if the yardstick's two readings differ by more than
    AGREE, or if the middle half of a side's `rounds` does.
    """
    readings = {"the yardstick": (before, after)}
    for name, values in rounds.items():
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        readings[name] = low, high
    for name, pair in readings.items():
        if max(pair) > AGREE * min(pair):
            raise SystemExit(f"not recorded: {name} read {min(pair):.3g} and {max(pair):.3g} in one run")
