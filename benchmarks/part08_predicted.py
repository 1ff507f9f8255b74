"""From steps to seconds: what do Part 7's two numbers say that Part 8's race takes?

    python -m benchmarks.part08_predicted       # measures nothing: it reckons from two records

A step costs once + S · each (part07_line), so a run costs steps · once + sequence-steps · each. The steps are
those of part08_schedulers. FIFO has one sequence in each step, so its steps are everybody's sequence-steps:
all three schedulers compute the same tokens of the same requests.
"""

from rich import print

from benchmarks.record import derive, read_record

RACE, LINE = "part08_schedulers", "part07_line"
ROWS = {"fifo": "FIFO", "static": "static batches", "continuous": "continuous"}  # as a row's name begins


def reckoned(line: dict, race: dict) -> dict:
    """Each scheduler's steps, and for each model the seconds that they should take."""
    steps, column = {}, race["columns"].index("steps")
    for key, beginning in ROWS.items():
        (steps[key],) = [row[column] for row in race["rows"] if row[0].startswith(beginning)]
    found: dict = {"steps": steps, "steps_alone": steps["continuous"] / steps["static"]}
    for model, fitted in line.items():
        once, each = fitted["once_ms"], fitted["each_ms"]
        seconds = {key: (count * once + steps["fifo"] * each) / 1e3 for key, count in steps.items()}
        found[model] = {"seconds": seconds, "over_static": seconds["continuous"] / seconds["static"]}
    return found


def main() -> None:
    figures = reckoned(read_record(LINE)["figures"], read_record(RACE)["tables"]["race"])
    print(figures)
    print(derive("part08_predicted", RACE, "What do Part 7's two numbers say that the race takes?", figures))


if __name__ == "__main__":
    main()
