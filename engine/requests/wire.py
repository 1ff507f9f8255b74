"""Converts the record of a step to bytes and back, for logs and for other processes. Part 20.

Promises a record that computes the same tokens, or a ValueError that says what is wrong with the bytes. The
bytes are JSON, so people can read them, and bytes from an unknown sender cannot run code.
"""

import json
from dataclasses import fields
from typing import Any

import numpy as np

from engine.decoding.sampling_state import Draw, Limits
from engine.requests.batch import (
    NO_ADAPTER,
    PLACEHOLDER,
    UNSCORED,
    Batch,
    Copy,
    Draws,
    Ints,
    Rows,
)

DTYPES: dict[type, dict[str, type]] = {  # the fields that are arrays
    Batch: {"tables": np.int64, "slots": np.int64},
    Draw: {"tokens": np.int64, "factors": np.float32, "mask": np.int32},
}
FIELDS = {kind: [spec.name for spec in fields(kind)] for kind in (Batch, Rows, Draws, Copy, Draw)}
MAX_INT = 2**40  # larger than any token id, position or block number


def to_bytes(batch: Batch) -> bytes:
    """The record as one line of JSON, without a newline at its end."""
    return json.dumps(batch, separators=(",", ":"), default=_to_plain).encode()


def from_bytes(data: bytes | str) -> Batch:
    """The record that `to_bytes` has converted. Raises ValueError if the bytes are not a record of a step."""
    try:
        return from_json(json.loads(data))
    except RecursionError:
        raise ValueError("no record of a step: nested too deeply") from None


def from_json(data: Any) -> Batch:
    """The record in the result of `json.loads`. Raises ValueError if it is not a record of a step."""
    try:
        draws = data["draws"]
        records = {  # the fields that are records themselves
            "copies": tuple(_from_fields(Copy, copy) for copy in data["copies"]),
            "rows": _from_fields(Rows, data["rows"]),
            "draws": Draws(tuple(map(_draw, draws["rows"])), tuple(draws["positions"])),
        }
        batch = _from_fields(Batch, data | records)
        _check_sequences(batch)
        _check_rows_and_draws(batch)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        reason = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise ValueError(f"no record of a step: {reason}") from None
    return batch


def _to_plain(value: Any) -> Any:
    """Convert what JSON lacks: an array to lists, and a dataclass to a dict of its fields."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    return {name: getattr(value, name) for name in FIELDS[type(value)]}


def _draw(data: dict[str, Any]) -> Draw:
    """A `Draw` from a dict of its fields. `params` is a NamedTuple, which JSON has written as a list."""
    return _from_fields(Draw, data | {"params": Limits(*data["params"])})


def _from_fields(kind: type, data: dict[str, Any]) -> Any:
    """An object of class `kind` from a dict of its fields. A list becomes an array for a field in DTYPES, and
    a tuple for any other field.
    """
    values: dict[str, Any] = {}
    dtypes = DTYPES.get(kind, {})
    for name, value in data.items():
        if not isinstance(value, list):
            values[name] = value
        elif name in dtypes:
            values[name] = _to_array(name, value, dtypes[name])
        else:
            values[name] = tuple(value)
    return kind(**values)


def _to_array(name: str, numbers: list[Any], dtype: type) -> np.ndarray:
    """A field in DTYPES, from lists. Raises ValueError for a value that NumPy would round or convert, such as
    1.7 or true for an integer.
    """
    expected = {int, float} if dtype is np.float32 else {int}
    if not {type(number) for number in np.array(numbers, dtype=object).flat} <= expected:
        kind = "numbers" if float in expected else "whole numbers"
        raise ValueError(f"{name}: lists of {kind} are expected, each of one length")
    with np.errstate(over="ignore"):  # a factor beyond fp32 becomes infinite, and is refused later
        array: np.ndarray = np.array(numbers, dtype=dtype)
    return array.reshape(-1, 3) if name == "factors" else array  # factors[C, 3], also if C is 0


# The checks below raise ValueError if a number is out of range, or if two fields contradict each other. This
# module does not know how many token ids, blocks and adapters there are. Before a recorded step is computed
# again, `Bounds` checks these limits (engine/execution/bounds.py).


def _check_sequences(batch: Batch) -> None:
    """Check the sequences, their tokens, and where these lie. Each sequence has at least one new token, and
    its new tokens are the last of its context.
    """
    S, T = len(batch.ids), batch.num_tokens
    if not S or not all(type(seq_id) is str for seq_id in batch.ids) or len(set(batch.ids)) < S:
        raise ValueError("ids: different names are expected")
    start = _check_ints("query_start", batch.query_start, S + 1)  # [S+1]
    context_lens = _check_ints("context_lens", batch.context_lens, S)  # [S]
    token_ids = _check_ints("token_ids", batch.token_ids, T, minimum=PLACEHOLDER)  # [T]
    positions = _check_ints("positions", batch.positions, T)  # [T]
    num_new = np.diff(start)  # [S]
    if start[0] != 0 or start[-1] != T or num_new.min() < 1:
        raise ValueError(f"query_start: from 0 to {T} is expected, a token or more for each")

    last = start[1:] - 1  # [S]: the index of each sequence's last token
    not_last = np.delete(token_ids, last)
    if (not_last == PLACEHOLDER).any():
        raise ValueError("token_ids: a placeholder is the last token of its sequence")

    # The last token of a context of n tokens is at position n - 1, and the others are right before it.
    distance_to_last = np.repeat(last, num_new) - np.arange(T)  # [T]
    expected = np.repeat(context_lens - 1, num_new) - distance_to_last  # [T]
    if (positions != expected).any():
        raise ValueError("positions: those of the last tokens of each sequence are expected")

    _check_array("tables", batch.tables, dim=2, length=S)
    _check_array("slots", batch.slots, dim=1, length=T)
    _check_ints("adapters", batch.adapters, S, minimum=NO_ADAPTER)
    for copy in batch.copies:
        _check_copy(copy)


def _check_copy(copy: Copy) -> None:
    """Check a copy's number, its kind, and that it has as many targets as sources."""
    _check_ints("number", (copy.number,))
    source = _check_ints("source", copy.source)
    _check_ints("target", copy.target, len(source))
    if copy.kind not in ("fork", "out", "in"):
        raise ValueError(f"copies: {copy.kind!r} is no kind")


def _check_rows_and_draws(batch: Batch) -> None:
    """Check which rows of logits are read, which tokens are scored, and how tokens are drawn."""
    rows, draws = batch.rows, batch.draws
    S, R = len(batch.ids), len(rows.chosen)
    start = np.array(batch.query_start)  # [S+1]
    _check_rows("rows.chosen", rows.chosen, rows.chosen_counts, start)
    if rows != Rows(rows.chosen, rows.chosen_counts):  # else all fields of log probabilities are ()
        _check_ints("rows.logprobs", rows.logprobs, S, minimum=UNSCORED)
        _check_ints("rows.prompt_logprobs", rows.prompt_logprobs, S, minimum=UNSCORED)
        _check_rows("rows.prompt_rows", rows.prompt_rows, rows.prompt_counts, start)
        _check_ints("rows.prompt_ids", rows.prompt_ids, len(rows.prompt_rows))
    _check_ints("draws.positions", draws.positions, R)
    if len(draws.rows) != R:
        raise ValueError(f"draws.rows: {len(draws.rows)}, where {R} are expected")
    for row in draws.rows:
        _check_draw(row)


def _check_rows(name: str, rows: Ints, counts: Ints, start: np.ndarray) -> None:
    """Raises ValueError if `rows` are not tokens of the step in ascending order, or if a sequence s does not
    have counts[s] of them. `start` is query_start[S+1].
    """
    row_numbers = _check_ints(name, rows)
    expected = _check_ints(f"counts of {name}", counts, len(start) - 1)
    if (np.diff(row_numbers) < 1).any() or (row_numbers >= start[-1]).any():
        raise ValueError(f"{name}: tokens of the step are expected, in order")
    num_rows_before = np.searchsorted(row_numbers, start)  # [S+1]: rows before each sequence
    if (np.diff(num_rows_before) != expected).any():
        raise ValueError(f"{name}: a sequence has more or fewer than its count says")


def _check_draw(row: Draw) -> None:
    """Raises ValueError if a field has the wrong type or is out of range. Any whole number will do for
    `seed`, `top_k` and `min_tokens`.
    """
    params = row.params
    if not all(type(value) is int for value in (row.seed, params.top_k, params.min_tokens)):
        raise ValueError("seed, top_k, min_tokens: whole numbers are expected")
    for name, value, largest in (  # the largest that SamplingParams accepts
        ("temperature", row.temperature, 1000), ("top_p", params.top_p, 1), ("min_p", params.min_p, 1),
    ):  # fmt: skip
        if type(value) not in (int, float) or not 0 <= value <= largest:
            raise ValueError(f"{name}: a number from 0 to {largest} is expected")
    if type(row.names_seed) is not bool or type(row.is_adjusted) is not bool:
        raise ValueError("names_seed, is_adjusted: true or false is expected")
    _check_ints("stop_ids", row.stop_ids)
    _check_ints("bad_ids", row.bad_ids)
    if row.tokens is not None or row.factors is not None:
        tokens = _check_array("tokens", row.tokens, dim=1)
        factors = _check_array("factors", row.factors, dim=2, length=len(tokens))
        if not np.isfinite(factors).all():
            raise ValueError("factors: finite numbers are expected")
    if row.mask is not None:
        _check_array("mask", row.mask, dim=1)


def _check_ints(name: str, values: Ints, length: int | None = None, minimum: int = 0) -> np.ndarray:
    """The values as an array, int64[length]. A `length` of None accepts any length.

    Raises ValueError if `values` is not a tuple of `length` ints from `minimum` to MAX_INT.
    """
    if type(values) is not tuple or not all(type(value) is int for value in values):
        raise ValueError(f"{name}: whole numbers are expected")
    if length is not None and len(values) != length:
        raise ValueError(f"{name}: {len(values)}, where {length} are expected")
    if values and not (min(values) >= minimum and max(values) <= MAX_INT):
        raise ValueError(f"{name}: numbers from {minimum} to {MAX_INT} are expected")
    return np.array(values, dtype=np.int64)


def _check_array(name: str, values: np.ndarray | None, dim: int, length: int | None = None) -> np.ndarray:
    """Return `values`. Raises ValueError if it is not an array of `dim` dimensions with `length` rows.

    A `length` of None accepts any number of rows.
    """
    if not isinstance(values, np.ndarray) or values.ndim != dim:
        raise ValueError(f"{name}: an array of {dim} dimensions is expected")
    if length is not None and len(values) != length:
        raise ValueError(f"{name}: {len(values)}, where {length} are expected")
    return values
