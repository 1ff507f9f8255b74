"""What do a million tokens cost on a GPU, by how many sequences share a step?

    python -m benchmarks.part19_dollars        # measures nothing: it reckons from part13_engine

Dollars are PRICE, which is supposed, by the tokens that an hour of such steps gives. Prompt tokens go through
the model 8,192 at a time.
"""

from benchmarks.record import derive, read_record, show

SOURCE = "part13_engine"
PRICE = 2.50  # dollars an hour
PROMPT_TOKENS = 8192  # of the record's prefill: 8 prompts of 1,024 tokens in one pass


def per_million(tokens_per_second: float) -> float:
    """Dollars for a million tokens."""
    return PRICE / (tokens_per_second * 3600) * 1e6


def reckoned(source: dict) -> dict:
    """Dollars per million tokens, from the figures of SOURCE."""
    speeds = {name[1:]: int(name[1:]) / step["ms"] * 1e3 for name, step in source["step"].items()}
    prompt_speed = PROMPT_TOKENS / source["prefill"]["ms"] * 1e3
    return {
        "price_per_hour": PRICE,
        "output_tokens_per_second": speeds,
        "input_tokens_per_second": prompt_speed,
        "output": {sequences: per_million(speed) for sequences, speed in speeds.items()},
        "input": per_million(prompt_speed),
        "alone_over_full": speeds["256"] / speeds["1"],
        "output_over_input": {sequences: prompt_speed / speed for sequences, speed in speeds.items()},
    }


def main() -> None:
    figures = reckoned(read_record(SOURCE)["figures"])
    speeds = figures["output_tokens_per_second"]
    rows: list[list] = [
        [f"an answer, {sequences} in a step", speed, figures["output"][sequences]]
        for sequences, speed in speeds.items()
    ]
    name = f"prompts, {PROMPT_TOKENS:,} tokens in a pass"
    rows.append([name, figures["input_tokens_per_second"], figures["input"]])
    tables = {"million": {"columns": ["tokens of", "tokens/s", "$ per million"], "rows": rows}}
    path = derive("part19_dollars", SOURCE, __doc__.splitlines()[0], figures, tables)
    show(path, tables)


if __name__ == "__main__":
    main()
