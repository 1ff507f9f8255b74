"""Do two numbers describe a step? A line through the decode steps of 2 to 16 sequences.

    python -m benchmarks.part07_line       # measures nothing: it reckons from part07_batching

A step of S sequences costs once + S · each: the line with the least squared error. Left out are the step of
one, which takes a shorter way through attention, and that of 32, which the line has to predict.
"""

import numpy as np

from benchmarks.record import derive, read_record, show

SOURCE, MODELS = "part07_batching", {"storyteller": "storyteller", "gpt2_shape": "GPT-2 124M's shape"}
FIRST, LAST = 2, 16  # sequences in the steps that the line is fitted to


def line(crowds: list[int], step_ms: list[float]) -> dict:
    """once and each in milliseconds, what they say of every crowd, and how far off that is."""
    fitted = [i for i, crowd in enumerate(crowds) if FIRST <= crowd <= LAST]
    each, once = np.polyfit([crowds[i] for i in fitted], [step_ms[i] for i in fitted], 1)
    at = dict(zip(crowds, step_ms, strict=True))
    each_by_hand = (at[8] - at[2]) / 6  # two unknowns, and the steps of 2 and of 8 give two equations
    once_by_hand = at[2] - 2 * each_by_hand
    says = [float(once + crowd * each) for crowd in crowds]
    off = [said / measured - 1 for said, measured in zip(says, step_ms, strict=True)]
    return {
        "once_ms": float(once),
        "each_ms": float(each),
        "crowds": crowds,
        "step_ms": step_ms,
        "says_ms": says,
        "off": off,
        "by_hand": {
            "each_ms": each_by_hand,
            "once_ms": once_by_hand,
            "says_16_ms": once_by_hand + 16 * each_by_hand,
            "saved_by_8_ms": 7 * once_by_hand,  # by one step of eight, against eight steps that each pay once
        },
        "off_at_most": max(abs(off[i]) for i in fitted),
    }


def reckoned(figures: dict) -> dict[str, dict]:
    return {model: line(figures["crowds"], figures["split"][model]["step_ms"]) for model in MODELS}


def main() -> None:
    figures = reckoned(read_record(SOURCE)["figures"])
    columns, rows = ["sequences in the step"], []
    for title in MODELS.values():
        columns += [f"{title}, ms", "the line says", "off by"]
    for i, crowd in enumerate(figures["storyteller"]["crowds"]):
        row: list = [crowd]
        for found in figures.values():
            row += [found["step_ms"][i], found["says_ms"][i], f"{round(found['off'][i], 2) + 0:+.0%}"]
        rows.append(row)
    tables = {"line": {"columns": columns, "rows": rows}}
    show(derive("part07_line", SOURCE, "Do two numbers describe a step?", figures, tables), tables)


if __name__ == "__main__":
    main()
