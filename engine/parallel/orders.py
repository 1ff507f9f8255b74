"""Orders from rank 0 to the other ranks, as bytes: a header and a payload. Extension A.

An order goes through a pipe that only rank 0 and one other process can open. An order can contain no code: a
step is whole numbers, an adapter is a safetensors file. The other ranks compute keys, values and sums, and
choose no token; so an order contains nothing of a request's text, no seed and no penalty.
"""

import struct
from collections.abc import Iterator
from itertools import count
from typing import IO

import numpy as np
import torch
from safetensors.torch import load, save

from engine.lora.adapter import Adapter, Factors
from engine.requests.batch import Batch, Copy, Draws, Ints, Rows

STEP, ADAPTER, STOP = range(3)  # kinds of orders
HEADER = struct.Struct("=qq")  # the kind, and the payload's length in bytes
COPY_KINDS = ("fork", "out", "in")  # kinds of `Copy`, by the number that stands for each in an order


class SequenceNumbers:
    """Gives whole numbers to sequences, in place of their ids, which are texts.

    A sequence keeps its number while it is in every step: `LastTokens` finds the token of the step before by
    the sequence. A sequence that misses a step gets a new number.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}  # by id, for the sequences of the last step
        self._counter = count()

    def of(self, ids: tuple[str, ...]) -> list[int]:
        """The numbers of a step's sequences, in the order of `ids`: [S]."""
        numbers: dict[str, int] = {}
        for seq_id in ids:
            known = self._numbers.get(seq_id)
            numbers[seq_id] = next(self._counter) if known is None else known
        self._numbers = numbers
        return list(numbers.values())


def step_numbers(batch: Batch, sequences: list[int]) -> np.ndarray:
    """Write a step as a flat array of int64.

    The first five numbers are S, T, R, the width W of the block tables, and the number of copies. The fields
    follow, in the order in which `step_from` reads them. `sequences`: [S], the numbers in place of `ids`.
    """
    S, W = batch.tables.shape
    rows = batch.rows
    fields = [
        [S, batch.num_tokens, len(rows.chosen), W, len(batch.copies)],
        sequences,
        batch.token_ids,
        batch.positions,
        batch.query_start,
        batch.context_lens,
        batch.tables.ravel(),
        batch.slots,
        rows.chosen,
        rows.chosen_counts,
        batch.adapters,
    ]
    for copy in batch.copies:
        kind = COPY_KINDS.index(copy.kind)
        fields += [[copy.number, kind, len(copy.source)], copy.source, copy.target]
    return np.concatenate([np.asarray(field, dtype=np.int64) for field in fields])


def step_from(numbers: np.ndarray) -> Batch:
    """Read the step that `step_numbers` wrote.

    The first five numbers are S, T, R, W and the number of copies. They say how long the fields are that
    follow: sequences S; token_ids and positions T; query_start S + 1; context_lens S; tables S · W, row by
    row; slots T; rows.chosen R; rows.chosen_counts and adapters S. Then come the copies: of each its number,
    the index of its kind in COPY_KINDS, the length n of its lists, n sources, n targets.

    In the batch, `ids` are the sequences' numbers as texts, tables[S, W] and slots[T] are int64 arrays, and
    the other lists are tuples. The step scores nothing, and its draws are empty: Draws((), ()).
    """
    S, T, R, W, num_copies = numbers[:5].tolist()
    end = 5

    def take(n: int) -> np.ndarray:
        nonlocal end
        end += n
        return numbers[end - n : end]

    def ints(n: int) -> Ints:
        return tuple(take(n).tolist())

    ids = tuple(map(str, take(S).tolist()))
    token_ids, positions, query_start, context_lens = ints(T), ints(T), ints(S + 1), ints(S)
    tables, slots = take(S * W).reshape(S, W), take(T)
    chosen, counts, adapters = ints(R), ints(S), ints(S)
    copies = []
    for _ in range(num_copies):
        number, kind, n = ints(3)
        copies.append(Copy(number, COPY_KINDS[kind], ints(n), ints(n)))  # type: ignore[arg-type]  # one of COPY_KINDS
    return Batch(
        ids=ids,
        token_ids=token_ids,
        positions=positions,
        query_start=query_start,
        context_lens=context_lens,
        tables=tables,
        slots=slots,
        copies=tuple(copies),
        rows=Rows(chosen, counts),
        draws=Draws((), ()),
        adapters=adapters,
    )


def step_payload(way_number: int, numbers: np.ndarray) -> bytes:
    """The payload of a step's order: the number of the way that computes the step, then `step_numbers`."""
    return np.concatenate([[way_number], numbers]).astype(np.int64).tobytes()


def read_step_payload(payload: bytes) -> tuple[int, np.ndarray]:
    """Read what `step_payload` wrote -> the number of the way, and the numbers for `step_from`."""
    # A copy that can be written to: torch warns about arrays that cannot.
    numbers = np.frombuffer(bytearray(payload), dtype=np.int64)
    return int(numbers[0]), numbers[1:]


def adapter_payload(slot: int, adapter: Adapter) -> bytes:
    """The payload of an adapter's order, as a safetensors file: the whole adapter and the number of its slot.

    "slot", "rank" and "scale" are one number each. Part i of layer NAME has the tensors "NAME/i/A" and
    "NAME/i/B", and "NAME/i/rows" with the ends of a slice if it changes only some rows of the layer.
    """
    tensors = {"slot": torch.tensor(slot), "rank": torch.tensor(adapter.rank)}
    tensors["scale"] = torch.tensor(adapter.scale, dtype=torch.double)
    for name, parts in adapter.layers.items():
        for i, factors in enumerate(parts):
            tensors[f"{name}/{i}/A"], tensors[f"{name}/{i}/B"] = factors.A, factors.B
            if factors.rows is not None:
                tensors[f"{name}/{i}/rows"] = torch.tensor([factors.rows.start, factors.rows.stop])
    return save({name: tensor.contiguous() for name, tensor in tensors.items()})


def read_adapter_payload(payload: bytes) -> tuple[int, Adapter]:
    """Read what `adapter_payload` wrote -> the slot and the adapter."""
    tensors = load(payload)
    slot, rank, scale = (tensors.pop(name).item() for name in ("slot", "rank", "scale"))
    layers: dict[str, tuple[Factors, ...]] = {}
    for name in sorted({key.split("/")[0] for key in tensors}):
        parts: list[Factors] = []
        while f"{name}/{len(parts)}/A" in tensors:
            part = f"{name}/{len(parts)}"
            bounds = tensors.get(f"{part}/rows")
            rows = None if bounds is None else slice(*bounds.tolist())
            parts.append(Factors(tensors[f"{part}/A"], tensors[f"{part}/B"], rows))
        layers[name] = tuple(parts)
    return int(slot), Adapter(int(rank), scale, layers)


def write_order(file: IO[bytes], kind: int, payload: bytes = b"") -> None:
    """Write and flush one order. Raises OSError if the reading process has ended."""
    file.write(HEADER.pack(kind, len(payload)) + payload)
    file.flush()


def read_orders(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield the kind and the payload of each order, until the order to stop, or until rank 0 has ended."""
    while True:
        header = file.read(HEADER.size)
        if len(header) < HEADER.size:  # rank 0 has ended
            return
        kind, length = HEADER.unpack(header)
        if kind == STOP:
            return
        payload = file.read(length)
        if len(payload) < length:  # rank 0 has ended
            return
        yield kind, payload
