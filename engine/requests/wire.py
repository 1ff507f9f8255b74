"""A step's record as bytes and back: to be logged, sent to another process, and computed there. Part 20.

Promises a record that computes the same tokens, or a ValueError that says what is wrong with it. The bytes
are JSON: people can read them, and those of a stranger command nothing.
"""

import json
import math
from dataclasses import fields
from typing import Any

import numpy as np

from engine.decoding.sampling import Draw, Limits
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

KINDS = {"tables": np.int64, "slots": np.int64, "tokens": np.int64, "factors": np.float32, "mask": np.int32}
FIELDS = {kind: [spec.name for spec in fields(kind)] for kind in (Batch, Rows, Draws, Copy, Draw)}
MOST = 2**40  # no position, token or block has a larger number


def to_bytes(batch: Batch) -> bytes:
    """A line of JSON, without its end."""
    return json.dumps(batch, separators=(",", ":"), default=_plain).encode()


def from_bytes(data: bytes | str) -> Batch:
    """What `to_bytes` was given. Raises ValueError: it is no record of a step."""
    try:
        return from_json(json.loads(data))
    except RecursionError:
        raise ValueError("no record of a step: nested too deeply") from None


def from_json(given: Any) -> Batch:
    """The same of what JSON says. Raises ValueError."""
    try:
        rows, draws = given["rows"], given["draws"]
        batch = _record(
            Batch,
            given
            | {
                "copies": tuple(_record(Copy, copy) for copy in given["copies"]),
                "rows": _record(Rows, rows),
                "draws": Draws(tuple(map(_draw, draws["rows"])), tuple(draws["positions"])),
            },
        )
        _check(batch)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        words = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise ValueError(f"no record of a step: {words}") from None
    return batch


def _plain(value: Any) -> Any:
    """What JSON does not know."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    return {name: getattr(value, name) for name in FIELDS[type(value)]}


def _draw(given: dict[str, Any]) -> Draw:
    return _record(Draw, given | {"params": Limits(*given["params"])})


def _record(kind: type, given: dict[str, Any]) -> Any:
    """One of these classes: lists become arrays where the field is one, and tuples elsewhere."""
    values = {}
    for name, value in given.items():
        if isinstance(value, list):
            with np.errstate(over="ignore"):  # what is too large becomes infinite
                value = np.array(value, dtype=KINDS[name]) if name in KINDS else tuple(value)
        values[name] = value
    if "factors" in values and values["factors"] is not None:
        values["factors"] = values["factors"].reshape(-1, 3)
    return kind(**values)


def _check(batch: Batch) -> None:
    """Numbers are what they should be, and what belongs together fits together. Raises ValueError. What there
    is to be named (tokens, blocks, adapters) a record does not know: whoever computes it does.
    """
    S, T, R, N = len(batch.ids), batch.num_tokens, len(batch.rows.chosen), len(batch.rows.prompt)
    rows, draws = batch.rows, batch.draws
    # 1. Sequences: each has new tokens, the last ones of its context.
    if not S or not all(type(name) is str for name in batch.ids) or len(set(batch.ids)) < S:
        raise ValueError("ids: different names are expected")
    start = _whole("query_start", batch.query_start, S + 1)
    ends = _whole("context_lens", batch.context_lens, S)
    new, token_ids = np.diff(start), _whole("token_ids", batch.token_ids, T, PLACEHOLDER)
    if start[0] != 0 or start[-1] != T or new.min() < 1:
        raise ValueError(f"query_start: from 0 to {T} is expected, a token or more for each")
    if (np.delete(token_ids, start[1:] - 1) == PLACEHOLDER).any():
        raise ValueError("token_ids: a placeholder is the last token of its sequence")
    wanted = np.arange(T) + np.repeat(ends - start[1:], new)
    if wanted[start[:-1]].min() < 0 or (_whole("positions", batch.positions, T) != wanted).any():
        raise ValueError("positions: the last ones of each sequence are expected")
    _shaped("tables", batch.tables, 2, S)
    _shaped("slots", batch.slots, 1, T)
    _whole("adapters", batch.adapters, S, NO_ADAPTER)
    for copy in batch.copies:
        _whole("number", (copy.number,), 1)
        _whole("target", copy.target, len(_whole("source", copy.source)))
        if copy.kind not in ("fork", "out", "in"):
            raise ValueError(f"copies: {copy.kind!r} is no kind")
    # 2. Rows, each in its sequence; what is scored; how tokens are drawn.
    _check_rows("rows.chosen", rows.chosen, rows.counts, start)
    if rows.prompt or rows.prompt_counts:
        _check_rows("rows.prompt", rows.prompt, rows.prompt_counts, start)
        _whole("rows.prompt_logprobs", rows.prompt_logprobs, S, UNSCORED)
    if rows.logprobs or rows.prompt_logprobs:
        _whole("rows.logprobs", rows.logprobs, S, UNSCORED)
        _whole("rows.prompt_counts", rows.prompt_counts, S)
    _whole("rows.prompt_ids", rows.prompt_ids, N)
    _whole("draws.positions", draws.positions, R)
    if len(draws.rows) != R:
        raise ValueError(f"draws.rows: {len(draws.rows)}, where {R} are expected")
    for row in draws.rows:
        _check_draw(row)


def _check_rows(name: str, rows: Ints, counts: Ints, start: np.ndarray) -> None:
    """In order, as many of each sequence as counted."""
    tokens, of_each = _whole(name, rows), _whole(f"counts of {name}", counts, len(start) - 1)
    if (np.diff(tokens) < 1).any() or (tokens >= start[-1]).any():
        raise ValueError(f"{name}: tokens of the step are expected, in order")
    if (np.diff(np.searchsorted(tokens, start)) != of_each).any():
        raise ValueError(f"{name}: others than were counted")


def _check_draw(row: Draw) -> None:
    params = row.params
    if not all(type(value) is int for value in (row.seed, params.top_k, params.min_tokens)):
        raise ValueError("seed, top_k, min_tokens: whole numbers are expected")
    for value in (row.temperature, params.top_p, params.min_p):
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise ValueError("temperature, top_p, min_p: numbers from 0 on are expected")
    if type(row.names_seed) is not bool or type(row.is_adjusted) is not bool:
        raise ValueError("names_seed, is_adjusted: true or false is expected")
    _whole("stop_ids", row.stop_ids)
    if row.is_adjusted or row.tokens is not None or row.factors is not None:
        tokens = _shaped("tokens", row.tokens, 1)
        if not np.isfinite(_shaped("factors", row.factors, 2, len(tokens))).all():
            raise ValueError("factors: finite numbers are expected")
    if row.mask is not None:
        _shaped("mask", row.mask, 1)


def _whole(name: str, values: Ints, length: int | None = None, least: int = 0) -> np.ndarray:
    """int64[length]. Raises ValueError: others, more or fewer, smaller than `least`."""
    if type(values) is not tuple or not all(type(value) is int for value in values):
        raise ValueError(f"{name}: whole numbers are expected")
    if length is not None and len(values) != length:
        raise ValueError(f"{name}: {len(values)}, where {length} are expected")
    if values and not (min(values) >= least and max(values) <= MOST):
        raise ValueError(f"{name}: numbers from {least} to {MOST} are expected")
    return np.array(values, dtype=np.int64)


def _shaped(name: str, values: np.ndarray | None, dim: int, length: int | None = None) -> np.ndarray:
    """As they are. Raises ValueError: no array of so many dimensions, and rows."""
    if not isinstance(values, np.ndarray) or values.ndim != dim:
        raise ValueError(f"{name}: an array of {dim} dimensions is expected")
    if length is not None and len(values) != length:
        raise ValueError(f"{name}: {len(values)}, where {length} are expected")
    return values
