"""A record of a step that could not have been one is refused before it runs."""

import copy
import random
import re
from dataclasses import replace

import pytest

from engine.execution.bounds import Bounds
from engine.execution.recording import ComparedStep
from engine.requests.batch import PLACEHOLDER
from engine.requests.wire import from_json
from engine.wiring.replay import replay
from tests.system.recordings import batches, lines_of, refused, write


def test_a_sequence_without_a_new_token_is_refused(recorded):
    batch = batches(lines_of(recorded))[0]
    n, rows, draws = batch["query_start"][1], batch["rows"], batch["draws"]
    for name in ("token_ids", "positions", "slots"):
        del batch[name][:n]
    batch["query_start"] = [0, 0, len(batch["token_ids"])]
    rows |= {"chosen": [row - n for row in rows["chosen"][1:]], "chosen_counts": [0, 1]}
    for values in draws.values():
        del values[0]
    with pytest.raises(ValueError, match="query_start: "):
        from_json(batch)


def test_a_row_behind_the_last_token_is_refused_though_no_sequence_counts_it(recorded):
    batch = batches(lines_of(recorded))[0]
    batch["rows"]["chosen"].append(len(batch["token_ids"]))
    for values in batch["draws"].values():
        values.append(values[-1])
    with pytest.raises(ValueError, match="chosen: tokens of the step"):
        from_json(batch)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("vocab_size", "token_ids"),
        ("max_positions", "context_lens"),
        ("num_blocks", "tables"),
        ("num_seqs", "sequences"),
        ("num_tokens", "tokens"),
    ],
)
def test_a_step_may_take_all_there_is_and_not_one_more(name, says, recorded):
    """One more would be somebody else's memory."""
    batch = from_json(batches(lines_of(recorded))[0])
    just = Bounds(
        max(batch.token_ids) + 1, max(batch.context_lens), int(batch.tables.max()) + 1, 16,
        num_swap_blocks=0, num_adapters=0, num_seqs=2, num_tokens=batch.num_tokens, has_last_tokens=False,
    )  # fmt: skip
    just.check(batch)
    with pytest.raises(ValueError, match=f"^{says}: "):
        replace(just, **{name: getattr(just, name) - 1}).check(batch)


HUGE = 2**31 - 1


WRONG = [  # where in a record, and what stands there
    ("runner", "nobody"),
    ("batch.token_ids.0", 10**6),
    ("batch.token_ids.0", -1),
    ("batch.token_ids.0", -2),
    ("batch.token_ids.0", 1.5),
    ("batch.token_ids", "text"),
    ("batch.positions.0", HUGE),
    ("batch.positions.0", -1),
    ("batch.context_lens.0", HUGE),
    ("batch.query_start.1", HUGE),
    ("batch.query_start.1", 0),
    ("batch.tables.0.0", HUGE),
    ("batch.tables.0.0", -1),
    ("batch.tables.0.0", 2**70),
    ("batch.tables", []),
    ("batch.tables", [0, 0]),
    ("batch.slots.0", HUGE),
    ("batch.slots.0", -1),
    ("batch.slots", None),
    ("batch.ids.1", "0/0"),
    ("batch.ids", ["a", {}]),
    ("batch.rows.chosen.0", HUGE),
    ("batch.rows.chosen.0", -1),
    ("batch.rows.chosen_counts.0", 2),
    ("batch.rows.chosen_counts.0", -1),
    ("batch.rows.logprobs.0", HUGE),
    ("batch.rows.logprobs", []),
    ("batch.rows.prompt_rows", [0]),
    ("batch.rows", 5),
    ("batch.adapters.0", 0),
    ("batch.adapters.0", -2),
    ("batch.copies", [1]),
    ("batch.copies", [{"number": 0, "kind": "fork", "source": [0], "target": [HUGE]}]),
    ("batch.copies", [{"number": 0, "kind": "fork", "source": [0], "target": [1, 2]}]),
    ("batch.copies", [{"number": 0, "kind": "in", "source": [0], "target": [1]}]),
    ("batch.copies", [{"number": 0, "kind": "away", "source": [0], "target": [1]}]),
    ("batch.draws.positions.0", -1),
    ("batch.draws.rows.0", None),
    ("batch.draws.rows.0.params", [1]),
    ("batch.draws.rows.0.params.0", "all"),
    ("batch.draws.rows.0.temperature", float("nan")),
    ("batch.draws.rows.0.params.1", 7.0),
    ("batch.draws.rows.0.params.2", 1.5),
    ("batch.draws.rows.0.temperature", -1),
    ("batch.draws.rows.0.temperature", 1001),
    ("batch.draws.rows.0.seed", None),
    ("batch.draws.rows.0.names_seed", 1),
    ("batch.draws.rows.0.is_adjusted", 1),
    ("batch.draws.rows.0.tokens.0", HUGE),
    ("batch.draws.rows.0.tokens.0", -1),
    ("batch.draws.rows.0.tokens", None),
    ("batch.draws.rows.0.factors", [[1, 2]]),
    ("batch.draws.rows.0.factors.0.0", 1e308),
    ("batch.draws.rows.0.stop_ids", [HUGE]),
    ("batch.draws.rows.0.bad_ids", [HUGE]),
    ("batch.draws.rows.0.bad_ids", [-1]),
    ("batch.draws.rows.0.bad_ids", None),
    ("batch.draws.rows.0.mask", [0] * (4096 // 32 + 1)),
    ("batch.draws.rows.0.mask", [[0]]),
    ("batch.draws", {}),
    ("batch.unheard_of", 1),
]


def put(line: dict, path: str, value) -> None:
    *way, last = path.split(".")
    for key in way:
        line = line[int(key) if isinstance(line, list) else key]
    line[int(last) if isinstance(line, list) else last] = value


@pytest.mark.parametrize(("path", "value"), WRONG, ids=[f"{path}={value}" for path, value in WRONG])
def test_a_record_of_what_is_not_there_is_refused_before_it_runs(path, value, recorded, tmp_path, quick):
    lines = lines_of(recorded)
    put(lines[1], path, value)
    assert "line 2: " in refused(write(tmp_path / "file", lines))


def test_whatever_is_changed_in_a_recording_it_is_refused_or_it_runs(recorded, tmp_path, quick):
    """A number where it is not expected; on a CPU PyTorch would say that a place does not exist."""
    rng = random.Random(1)
    good = lines_of(recorded)
    values = [-(2**63), -2, -1, 0, 1, 2, 3, 40, 4000, HUGE, 2**70, 0.5, 1e308, None, "0", [], [0], {}, True]

    def leaves(value, path=""):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, below in items:
            yield f"{path}{key}"
            if isinstance(below, dict | list):
                yield from leaves(below, f"{path}{key}.")

    ran, refusals = 0, []
    for _ in range(400):
        lines = copy.deepcopy(good)
        number = rng.choice([0, *[i for i, line in enumerate(lines) if "batch" in line]])
        put(lines[number], rng.choice(list(leaves(lines[number]))), rng.choice(values))
        compared: list[ComparedStep] = []
        try:
            compared += replay(write(tmp_path / "file", lines))
        except ValueError as error:
            refusals.append((number, str(error)))
        else:
            ran += 1
        assert not [c.error_now for c in compared if c.error_now], lines[number]
    assert min(ran, len(refusals)) > 20
    for number, said in refusals:
        line = re.search(r"(?<=^line )\d+(?=: )", said)
        assert (int(line[0]) > number) if line else "first line" in said


def test_a_placeholder_stands_for_the_last_token_of_a_sequence_and_for_no_other(recorded):
    """Whoever computes the record has the token that the step before chose, one for each sequence."""
    batch = batches(lines_of(recorded))[0]
    ends = [end - 1 for end in batch["query_start"][1:]]
    assert len(ends) > 1
    assert ends[0] > 1, "prompts of several tokens"
    for t in range(len(batch["token_ids"])):
        changed = copy.deepcopy(batch)
        changed["token_ids"][t] = PLACEHOLDER
        if t in ends:
            assert from_json(changed).token_ids[t] == PLACEHOLDER
        else:
            with pytest.raises(
                ValueError, match="token_ids: a placeholder is the last token of its sequence"
            ):
                from_json(changed)


SCORED = ("logprobs", "prompt_logprobs", "prompt_rows", "prompt_ids", "prompt_counts")


@pytest.mark.parametrize("value", [0, None, {}, ""])
@pytest.mark.parametrize("name", SCORED)
def test_the_fields_of_log_probabilities_are_lists_even_if_no_request_asks_for_any(name, value, recorded):
    batch = batches(lines_of(recorded))[0]
    batch["rows"] |= {key: [] for key in SCORED}
    assert from_json(batch).rows.logprobs == ()
    batch["rows"][name] = value
    with pytest.raises(ValueError, match="no record of a step: "):
        from_json(batch)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("tables.0.0", 1.7),
        ("tables.0.0", True),
        ("slots.0", 1.0),
        ("slots.0", "1"),
        ("draws.rows.0.tokens.0", 1.7),
        ("draws.rows.0.mask.0", True),
        ("draws.rows.0.factors.0.0", True),
        ("draws.rows.0.factors.0.0", "1"),
    ],
)
def test_a_number_that_numpy_would_convert_is_refused(path, value, recorded):
    batch = batches(lines_of(recorded))[0]
    batch["draws"]["rows"][0] |= {"mask": [-1, 1], "tokens": [1], "factors": [[0, 1, 1]]}
    from_json(copy.deepcopy(batch))
    put(batch, path, value)
    with pytest.raises(ValueError, match=r": lists of (whole )?numbers are expected"):
        from_json(batch)
