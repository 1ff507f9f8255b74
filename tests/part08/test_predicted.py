"""What is reckoned from records agrees with the records that are there."""

from benchmarks import part07_line, part08_predicted
from benchmarks.record import read_record


def rounded(tree):
    """A record's figures with eight digits of each number: processors differ in the last ones."""
    if isinstance(tree, dict):
        return {key: rounded(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [rounded(value) for value in tree]
    return float(f"{tree:.8g}")


def test_part_7s_line_is_of_part_7s_steps():
    reckoned = part07_line.reckoned(read_record("part07_batching")["figures"])
    assert rounded(reckoned) == rounded(read_record("part07_line")["figures"]), (
        "part07_batching was measured again: python -m benchmarks.part07_line"
    )


def test_the_predicted_race_is_of_the_line_and_the_steps_that_were_run():
    line, race = read_record("part07_line")["figures"], read_record("part08_schedulers")["tables"]["race"]
    reckoned = part08_predicted.reckoned(line, race)
    assert rounded(reckoned) == rounded(read_record("part08_predicted")["figures"]), (
        "a record that it comes from is newer: python -m benchmarks.part08_predicted"
    )


def test_seconds_are_steps_times_once_and_sequence_steps_times_each():
    race = {
        "columns": ["scheduler", "steps"],
        "rows": [["FIFO (Part 6)", 100], ["static batches of 8", 30], ["continuous, 8 at once", 20]],
    }
    found = part08_predicted.reckoned({"a model": {"once_ms": 10.0, "each_ms": 1.0}}, race)
    assert found["a model"]["seconds"] == {"fifo": 1.1, "static": 0.4, "continuous": 0.3}
    assert found["a model"]["over_static"] == 0.3 / 0.4


def test_a_line_through_steps_that_lie_on_one_is_off_by_nothing():
    found = part07_line.line([1, 2, 5, 8, 16, 32], [5.0, 6.0, 9.0, 12.0, 20.0, 36.0])
    assert abs(found["once_ms"] - 4) < 1e-9
    assert abs(found["each_ms"] - 1) < 1e-9
    assert max(map(abs, found["off"])) < 1e-9
