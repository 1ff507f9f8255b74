"""The grouped product in Triton, in its interpreter: what plain PyTorch gives, over fixed buffers."""

import pytest
import torch

pytest.importorskip("triton", reason="needs the package triton")

from engine.decoding.params import SamplingParams
from engine.lora.rows import NO_ADAPTER, GroupedRows
from engine.lora.tiles import PADDING, TILE, TiledRows, tiles_of
from tests.part06.fakes import assert_idle, run_to_end
from tests.part13.test_paged_attention import DEVICE
from tests.part17.touched import num_outside, touched
from tests.part18.ahead import composed_ahead
from tests.part18.test_mixed_batches import tokens
from tests.part18.tiny import composed, load

SLOTS = 3


def numbers(T: int, into: int, K: int, out: int, dtype=torch.float32, seed: int = 0):
    """y[T, out], x[T, in], down[SLOTS, in, K], up[SLOTS, K, out]"""
    generator = torch.Generator().manual_seed(seed)
    shapes = (T, out), (T, into), (SLOTS, into, K), (SLOTS, K, out)
    return [torch.randn(*shape, generator=generator).to(DEVICE, dtype) for shape in shapes]


def test_a_tile_has_rows_of_one_adapter():
    tile_rows, tile_slots = tiles_of([2, 0, NO_ADAPTER, 2], [0, TILE + 1, TILE + 3, TILE + 4, TILE + 5])
    assert tile_slots == [0, 2, 2]
    assert tile_rows[0] == [TILE + 1, TILE + 2] + [PADDING] * (TILE - 2), "a tile that is not full"
    assert tile_rows[1] == list(range(TILE))
    assert tile_rows[2] == [TILE, TILE + 4] + [PADDING] * (TILE - 2), "rows need not be neighbours"


@pytest.mark.parametrize(
    ("into", "K", "out"), [(48, 4, 144), (64, 16, 64), (130, 3, 70), (16, 20, 100)],
    ids=["thin", "whole tiles", "odd", "wide middle"],
)  # fmt: skip
@pytest.mark.parametrize(
    ("slots", "lengths"),
    [
        ([0], [1]),
        ([0, 1, 2, NO_ADAPTER], [1, 1, 1, 1]),
        ([1, NO_ADAPTER, 1, 2], [5, 3, 14, 17]),
        ([NO_ADAPTER], [4]),
    ],
    ids=["one row", "one each", "chunks", "nobody"],
)
def test_the_tiles_give_what_plain_pytorch_gives(slots, lengths, into, K, out):
    query_start = [sum(lengths[:s]) for s in range(len(lengths) + 1)]
    y, x, down, up = numbers(query_start[-1], into, K, out)
    plain, tiled = GroupedRows(), TiledRows(64, SLOTS, torch.device(DEVICE))
    want = y.cpu().clone()
    plain.fill(slots, query_start), tiled.fill(slots, query_start)
    plain.add(want, x.cpu(), down.cpu(), up.cpu())
    got = tiled.add(y, x, down, up)
    assert got is y, "in place"
    assert torch.allclose(got.cpu(), want, atol=1e-3)


def test_rows_of_nobody_stay_bit_for_bit():
    y, x, down, up = numbers(6, 48, 4, 40)
    rows, before = TiledRows(16, SLOTS, torch.device(DEVICE)), y.clone()
    rows.fill([NO_ADAPTER, 1, NO_ADAPTER], [0, 2, 4, 6])
    rows.add(y, x, down, up)
    assert torch.equal(y[[0, 1, 4, 5]], before[[0, 1, 4, 5]])
    assert not torch.equal(y[2:4], before[2:4])


def test_nothing_of_the_last_step_is_left():
    y, x, down, up = numbers(20, 48, 4, 40)
    rows, before = TiledRows(20, SLOTS, torch.device(DEVICE)), y.clone()
    rows.fill([0, 1], [0, 10, 20])
    rows.fill([NO_ADAPTER], [0, 20])
    assert torch.equal(rows.add(y, x, down, up), before), "a tile of the last step is nobody's now"


def test_a_graph_looks_at_more_rows_than_the_step_has():
    """It was recorded for eight; the step has three, and the rest is nobody's."""
    y, x, down, up = numbers(8, 48, 4, 40)
    rows, before = TiledRows(16, SLOTS, torch.device(DEVICE)), y.clone()
    rows.fill([0] * 8, list(range(9)))
    rows.fill([2, NO_ADAPTER, 1], [0, 1, 2, 3])
    rows.add(y, x, down, up)
    assert torch.equal(y[3:], before[3:])
    assert torch.equal(y[1], before[1])
    assert not torch.equal(y[0], before[0])


def test_addresses_never_change():
    """A graph has written them down."""
    rows = TiledRows(32, SLOTS, torch.device(DEVICE))
    rows.fill([0, 1], [0, 4, 8])
    rows.add(*numbers(8, 48, 4, 40))
    addresses = rows.tile_rows.data_ptr(), rows.tile_slots.data_ptr(), rows.middle.data_ptr()
    for slots in ([2], [0, 1, 2], [NO_ADAPTER]):
        rows.fill(slots, list(range(len(slots) + 1)))
        rows.add(*numbers(len(slots), 48, 4, 40))
    assert (rows.tile_rows.data_ptr(), rows.tile_slots.data_ptr(), rows.middle.data_ptr()) == addresses


@pytest.mark.parametrize("max_tokens", [1, 5, 40, 600])
def test_there_are_tiles_enough_for_the_worst_mixture(max_tokens):
    """Each adapter begins a tile of its own."""
    rows = TiledRows(max_tokens, SLOTS, torch.device(DEVICE))
    slots = [t % SLOTS for t in range(max_tokens)]
    rows.fill(slots, list(range(max_tokens + 1)))
    assert len(tiles_of(slots, list(range(max_tokens + 1)))[1]) <= rows._max_tiles(max_tokens)


def test_half_precision_is_summed_in_full():
    y, x, down, up = (tensor / 4 for tensor in numbers(9, 128, 8, 64, torch.float16))
    want = y.float() + (x.float() @ down[1].float()) @ up[1].float()
    rows = TiledRows(16, SLOTS, torch.device(DEVICE))
    rows.fill([1], [0, 9])
    assert (rows.add(y, x, down, up).float() - want).abs().max() < 0.01


def test_decode_steps_over_fixed_buffers_give_the_tokens_of_plain_steps(base, adapters):
    """As a graph would run: the rows are filled before it is replayed."""
    three = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)  # the interpreter is slow

    def told(engine, manager):
        for name in ("poetry", "business"):
            load(manager, name, adapters[name], engine.config)
            engine.add_request(name, "ab", three, adapter=name)
        engine.add_request("base", "ab", three)
        done = run_to_end(engine)
        assert_idle(engine)
        return {name: tokens(output) for name, output in sorted(done.items())}

    found = told(*composed_ahead(base, graphs=True, seats=3))
    assert found == told(*composed(base))
    assert len({*map(tuple, found.values())}) == 3, "three different texts"


def test_a_wrapped_model_is_not_run_by_kernels_that_read_weights_themselves(base):
    """They would pass the wrappers by."""
    from engine.execution.graphs import ModelStep, fastest_steps

    engine, _ = composed_ahead(base, graphs=True)
    eager = engine.executor.ways[-1]
    assert isinstance(fastest_steps(eager.model, eager.memory, 2)(1), ModelStep)


def test_x_may_be_a_slice_and_the_middle_grows_with_the_rank():
    rows, plain = TiledRows(16, SLOTS, torch.device(DEVICE)), GroupedRows()
    rows.fill([1], [0, 3]), plain.fill([1], [0, 3])
    for K in (2, 20, 5):
        y, x, down, up = numbers(3, 96, K, 40)
        x, down = x[:, ::2], down[:, :48].contiguous()
        want = plain.add(y.cpu().clone(), x.cpu(), down.cpu(), up.cpu())
        assert torch.allclose(rows.add(y, x, down, up).cpu(), want, atol=1e-3), f"rank {K}"


def test_a_tile_stores_nothing_behind_a_rows_last_column():
    """There is the next row's first number, which another program may be adding to. The tile's rows are
    turned round, so that whoever stored it last would have the wrong one.
    """
    y, x, down, up = numbers(2, 48, 4, 40)
    rows = TiledRows(16, SLOTS, torch.device(DEVICE))
    rows.fill([0], [0, 2])
    want = rows.add(y.clone(), x, down, up)
    rows.tile_rows[0, :2] = torch.tensor([1, 0])
    assert torch.allclose(rows.add(y.clone(), x, down, up), want), "the order of rows changes no number"


@pytest.mark.skipif(DEVICE != "cpu", reason="the interpreter tells which addresses a kernel reads and writes")
@pytest.mark.parametrize(("into", "K", "out"), [(130, 3, 70), (48, 20, 40)])
def test_nothing_but_the_operands_is_read_or_written(into, K, out):
    """The last slot and the last row: a byte behind them may belong to nobody, and a GPU then ends the whole
    process.
    """
    y, x, down, up = numbers(4, into, K, out)
    rows = TiledRows(4, SLOTS, torch.device(DEVICE))
    rows.fill([0, NO_ADAPTER, SLOTS - 1], [0, 1, 2, 4])
    with touched() as addresses:
        rows.add(y, x, down, up)
    operands = y, x, down, up, rows.tile_rows, rows.tile_slots, rows.middle
    assert num_outside(addresses, operands) == 0, "masks end where the operands end, padding included"
