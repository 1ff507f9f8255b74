"""A step of many sequences gives the logits of the model's own forward pass, and stores the same keys."""

import pytest
import torch

pytest.importorskip("triton", reason="needs the package triton")

from engine.attention.paged import Gathered, Pages
from engine.kernels import many_rows
from engine.kernels.many_rows import ManyRows
from engine.models.loader import load_model
from tests.part01.reference import random_gpt2, save
from tests.part13.test_paged_attention import DEVICE, P

SPLIT, HEADS = (320, 5) if DEVICE == "cuda" else (48, 3)  # the inner dimension is of split-K
SHAPES = {"narrow": {"n_embd": 32, "n_head": 2}, "split": {"n_embd": SPLIT, "n_head": HEADS}}
VOCAB = 70  # padded to 128
TOLERANCE = 2e-4


@pytest.fixture(scope="module", params=SHAPES)
def model(request, tmp_path_factory):
    theirs = random_gpt2(vocab_size=VOCAB, n_layer=1, **SHAPES[request.param])
    return load_model(save(theirs, tmp_path_factory.mktemp("gpt2")), DEVICE, "float32")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """In the interpreter, so that a small model's products are split, too."""
    tile = {"COLS": 16, "num_warps": 4}
    small = {"SPLITS": 3, "INNER": 16, "FEW_ROWS_TILE": tile, "MANY_ROWS_TILE": tile}
    for name, value in small.items() if DEVICE == "cpu" else ():
        monkeypatch.setattr(many_rows, name, value)


class Step:
    """Sequences of these lengths, the new token counted; a length of 0 is a padding row."""

    def __init__(self, model, lens: list[int]) -> None:
        self.model, self.lens = model, lens
        config, generator = model.config, torch.Generator().manual_seed(sum(lens))
        self.live = [s for s, n in enumerate(lens) if n]
        live_lens = [lens[s] for s in self.live]
        counts = [-(-n // P) for n in live_lens]
        B = sum(counts) + 2
        tables = torch.randperm(B, generator=generator)[: sum(counts)].split(counts)
        self.pages = Pages.of([table.numpy() for table in tables], live_lens, P)
        shape = 2, config.num_layers, B, P, config.num_kv_heads, config.head_dim
        self.memory = torch.randn(shape, generator=generator).to(DEVICE)
        S, device = len(lens), torch.device(DEVICE)
        self.token_ids = torch.randint(VOCAB, (S,), generator=generator).int().to(DEVICE)
        self.positions = torch.tensor([max(n - 1, 0) for n in lens], dtype=torch.int32, device=DEVICE)
        self.slots = torch.full((S,), -1, dtype=torch.int32, device=DEVICE)
        places = self.pages.places(range(len(self.live)), self.pages.lens - 1)
        self.slots[self.live] = torch.tensor(places, dtype=torch.int32, device=DEVICE)
        self.tables = torch.full((S, self.pages.tables.shape[1]), 10**6, dtype=torch.int32, device=DEVICE)
        self.context = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
        self.tables[self.live], _ = self.pages.on(device)

    def want(self):
        """logits of the live rows, and the memory after the step."""
        memory, slots = self.memory.clone(), self.slots[self.live].long()

        def attend(layer, q, k, v):
            for x, rows in zip(memory[:, layer], (k, v), strict=True):
                x.flatten(0, 1)[slots] = rows
            return Gathered(self.pages, q.shape[1], memory[0, layer])(q, *memory[:, layer])

        hidden = self.model(self.token_ids[self.live].long(), self.positions[self.live].long(), attend)
        return self.model.logits(hidden), memory

    def check(self, max_rows: int) -> None:
        memory = self.memory.clone()
        step = ManyRows(self.model, list(memory[0]), list(memory[1]), max_rows)
        inputs = self.token_ids, self.positions, self.slots, self.tables, self.context
        with torch.inference_mode():
            logits, stored = self.want()
            for _ in range(2):  # a second run over the same buffers: nothing is left behind by the first
                got = step(*inputs)[self.live, :VOCAB]
                assert torch.allclose(got, logits, atol=TOLERANCE), "each row's logits are the model's"
        assert torch.allclose(memory, stored, atol=1e-5), (
            "the new tokens' keys and values lie in their slots, and nothing else has changed"
        )


@pytest.mark.parametrize("lens", [[20], [17, 1, 40]])
def test_logits_and_stored_keys_are_the_models(model, lens):
    Step(model, lens).check(max_rows=4)


def test_padding_rows_change_nothing(model):
    Step(model, [0, 20, 0, 3]).check(max_rows=4)


def test_beyond_a_number_of_rows_products_are_not_split(model, monkeypatch):
    monkeypatch.setattr(many_rows, "SPLIT_ROWS", 2)
    monkeypatch.setattr(many_rows, "_split_linear", None)
    Step(model, [5, 18, 2]).check(max_rows=3)


def test_a_product_is_split_up_to_that_number_of_rows(model, monkeypatch):
    calls, split = [], many_rows._split_linear

    class Counting:
        def __getitem__(self, grid):
            calls.append(grid)
            return split[grid]

    monkeypatch.setattr(many_rows, "_split_linear", Counting())
    Step(model, [5, 18]).check(max_rows=2)
    assert len(calls) == (2 * 2 if model.config.hidden_size == SPLIT else 0), (
        "the two products with few columns, where the inner dimension divides"
    )


def test_many_rows_are_split_into_other_tiles(model, monkeypatch):
    """Up to FEW_ROWS rows one tile, above it the other."""
    taken, split = [], many_rows._split_linear

    class Noting:
        def __getitem__(self, grid):
            taken.append(grid[0])
            return split[grid]

    D = model.config.hidden_size
    monkeypatch.setattr(many_rows, "FEW_ROWS", 2)
    few, many = ({"COLS": cols, "num_warps": 4} for cols in (D // 3 if DEVICE == "cpu" else D // 5, 16))
    monkeypatch.setattr(many_rows, "FEW_ROWS_TILE", few)
    monkeypatch.setattr(many_rows, "MANY_ROWS_TILE", many)
    monkeypatch.setattr(many_rows, "_split_linear", Noting())
    Step(model, [5, 18]).check(max_rows=3)
    two, taken[:] = set(taken), []
    Step(model, [5, 18, 2]).check(max_rows=3)
    split_up = D == SPLIT  # else the inner dimension does not divide, and no product is split
    assert two == ({D // few["COLS"]} if split_up else set())
    assert set(taken) == ({D // many["COLS"]} if split_up else set())
