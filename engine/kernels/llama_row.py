"""A decode step of Llama or Qwen3 for one sequence: a chain of five kernels a layer, as `single_row.py` for
GPT-2. Part 20.

Promises the model's own logits up to rounding. Residuals and sums are in fp32. A norm has no kernel of its
own: the next product is computed first and then divided by the root mean square, which is one number.
`attend_row` norms, rotates, stores and attends for one key head and the queries that share this key head.
With PDL (`pdl.py`) each kernel from the third on is launched while the previous kernel still runs. Until that
has ended, it loads weights and old keys, which no kernel of the step writes.

A step has one row. `LlamaRows(stores_first=True)` computes steps with several rows of one sequence.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from engine.kernels.flash_prefill import MIN_DOT_SIZE
from engine.kernels.llama_attend import MIN_HEAD_DIM_OF_HALVES, gains_of, llama_blocks
from engine.kernels.llama_attend_row import attend_row
from engine.kernels.pdl import has_pdl, release, wait
from engine.kernels.single_row import load_rows
from engine.kernels.tiles import Tile, num_multiprocessors, power_of_2_up_to
from engine.models.llama import Attention
from engine.models.llama import Model as Llama

TILES = {
    "qkv": Tile(rows=8, warps=4, resident=4),
    "proj": Tile(rows=4, warps=4, resident=None),
    "gate_up": Tile(rows=4, warps=4, resident=4),
    "down": Tile(rows=2, warps=2, resident=None),
    "head": Tile(rows=4, warps=4, resident=None),
}
MAX_HELD_WEIGHTS = 128  # of a tile, for each thread; of many more, the compiler moves some to slow memory
THREADS_PER_WARP = 32
MAX_WARPS = 8  # of a program; with more, a thread has too few registers
ATTEND_TILE = {"TOKENS": 64, "num_warps": 4}  # old tokens that a program reads at a time
MAX_SPLITS = 16  # the most programs among which the sequence is split, for each key head


def tile_of(name: str, K: int) -> Tile:
    """The tile for a layer with K inputs, with `name` in TILES. Where a thread would hold more than
    MAX_HELD_WEIGHTS weights, the tile gets more warps, up to MAX_WARPS, and then fewer rows, down to one.
    """
    tile = TILES[name]
    matrices = 2 if name == "gate_up" else 1  # a row of gate and a row of up make one number
    while tile.rows * matrices * K > MAX_HELD_WEIGHTS * THREADS_PER_WARP * tile.warps:
        if tile.warps < MAX_WARPS:
            tile = tile._replace(warps=2 * tile.warps)
        elif tile.rows > 1:
            tile = tile._replace(rows=tile.rows // 2)
        else:
            break
    return tile


class LlamaRow:
    """The forward pass of one sequence's next token. Its buffers keep their addresses."""

    def __init__(self, model: Llama, keys: list[Tensor], values: list[Tensor]) -> None:
        """`model`: a model for which `LlamaRows.fits` and `fits` are true. `keys` and `values`: one tensor
        [B, P, Hkv, Dh] for each layer.
        """
        config = self.config = model.config
        device, dtype = model.embed.weight.device, model.embed.weight.dtype
        Hq, Hkv, Dh = config.num_heads, config.num_kv_heads, config.head_dim
        self.model, self.keys, self.values = model, keys, values
        self.blocks = llama_blocks(model)
        self.frequencies = model.get_buffer("frequencies")
        self.pdl = has_pdl(device)
        self.multiprocessors = num_multiprocessors(device)
        programs = 2 * self.multiprocessors // Hkv  # for each key head, with two programs a multiprocessor
        # At least 2, so that the interpreter, with its one multiprocessor, also joins parts.
        self.splits = min(MAX_SPLITS, max(2, power_of_2_up_to(programs)))
        empty = partial(torch.empty, device=device, dtype=dtype)
        empty_fp32 = partial(torch.empty, device=device)
        self.x = empty_fp32(config.hidden_size)  # the residual
        self.cos_sin = empty_fp32(2, Dh // 2)
        self.qkv = empty(1, (Hq + 2 * Hkv) * Dh)
        self.attended = empty(Hq * Dh)
        self.inner = empty(config.intermediate_size)
        self.logits = empty_fp32(1, config.vocab_size)
        self.parts = empty_fp32(Hq, self.splits, Dh)
        self.maxima = empty_fp32(Hq, self.splits)  # of each part
        self.totals = empty_fp32(Hq, self.splits)  # of each part
        # For each key head, the number of programs that have stored their part. 0 between two steps.
        self.arrived = torch.zeros(Hkv, device=device, dtype=torch.int32)

    @staticmethod
    def fits(model: Llama) -> bool:
        """Whether the heads are wide enough for this chain. `LlamaRows.fits(model)` must be true."""
        return model.config.head_dim >= MIN_HEAD_DIM_OF_HALVES

    def __call__(
        self, token_ids: Tensor, positions: Tensor, slots: Tensor, tables: Tensor, lens: Tensor
    ) -> Tensor:
        """token_ids, positions, slots, lens[1], tables[1, W] -> logits[1, V] in fp32, in a buffer that the
        next call overwrites.

        `lens` counts the new token, too. A length of 0 is a padding row, whose logits may be anything.
        """
        model, config = self.model, self.config
        D, half = config.hidden_size, config.head_dim // 2
        _embed_row[(1,)](
            token_ids, positions, model.embed.weight, self.frequencies, self.x, self.cos_sin,
            config.rope.scale, D=D, PADDED=triton.next_power_of_2(D), HALF=half, num_warps=8,
        )  # fmt: skip
        for layer, block in enumerate(self.blocks):
            attention, mlp = block.attention, block.mlp
            self._launch_rms_norm_linear("qkv", block.norm1, attention.qkv, self.qkv)
            self._launch_attend(attention, self.keys[layer], self.values[layer], slots, tables, lens)
            self._launch_linear_add("proj", self.attended, attention.proj)
            self._launch_rms_norm_linear("gate_up", block.norm2, mlp.gate_up, self.inner)
            self._launch_linear_add("down", self.inner, mlp.down)
        self._launch_rms_norm_linear("head", model.norm, model.head, self.logits)
        return self.logits

    def _launch_rms_norm_linear(self, name: str, norm: nn.RMSNorm, linear: nn.Linear, out: Tensor) -> None:
        """Launch the kernel `_rms_norm_linear`: out = linear(norm(self.x)). `name`: a key of TILES."""
        N, K = out.numel(), linear.in_features
        tile = tile_of(name, K)
        _rms_norm_linear[(tile.num_programs(N, self.multiprocessors),)](
            self.x, linear.weight, linear.bias, norm.weight, out, self.config.norm_eps, N=N, K=K,
            PADDED=triton.next_power_of_2(K), GATED=name == "gate_up", BIAS=linear.bias is not None,
            **tile.launch_options(N, self.multiprocessors, self.pdl),
        )  # fmt: skip

    def _launch_linear_add(self, name: str, a: Tensor, linear: nn.Linear) -> None:
        """Launch the kernel `_linear_add`: self.x += linear(a). `name`: a key of TILES.

        `LlamaRows.fits` accepts only layers without a bias here.
        """
        N, K = linear.weight.shape
        tile = tile_of(name, K)
        _linear_add[(tile.num_programs(N, self.multiprocessors),)](
            a, linear.weight, self.x, N=N, K=K, PADDED=triton.next_power_of_2(K),
            **tile.launch_options(N, self.multiprocessors, self.pdl),
        )  # fmt: skip

    def _launch_attend(
        self, attention: Attention, keys: Tensor, values: Tensor, slots: Tensor, tables: Tensor, lens: Tensor
    ) -> None:
        """Launch `attend_row`: store the new key and value, and write attention's result to self.attended."""
        config = self.config
        q_gain, k_gain = gains_of(attention)
        attend_row[(config.num_kv_heads, self.splits)](
            self.qkv, self.cos_sin, q_gain, k_gain, keys, values, slots, tables, lens, self.attended,
            self.parts, self.maxima, self.totals, self.arrived, config.norm_eps, config.head_dim**-0.5,
            HQ=config.num_heads, HKV=config.num_kv_heads, HALF=config.head_dim // 2, P=keys.shape[1],
            ROWS=max(MIN_DOT_SIZE, triton.next_power_of_2(config.num_heads // config.num_kv_heads)),
            NORM=config.qk_norm, SPLITS=self.splits, PDL=self.pdl, launch_pdl=self.pdl, **ATTEND_TILE,
        )  # fmt: skip


@triton.jit
def _embed_row(
    token_ids, positions, embed, frequencies, x, cos_sin, scale,
    D: tl.constexpr, PADDED: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """x[D] = embed[token]; cos_sin[2, HALF] = cosines and sines of the position's angles."""
    column, pair = tl.arange(0, PADDED), tl.arange(0, HALF)
    token = tl.load(token_ids).to(tl.int64)
    embedding = tl.load(embed + token * D + column, mask=column < D, other=0.0)
    tl.store(x + column, embedding.to(tl.float32), mask=column < D)
    angle = tl.load(positions).to(tl.float32) * tl.load(frequencies + pair)
    tl.store(cos_sin + pair, tl.cos(angle) * scale)
    tl.store(cos_sin + HALF + pair, tl.sin(angle) * scale)


@triton.jit
def _rms_norm_linear(
    x, weight, bias, gain, out, eps,
    N: tl.constexpr, K: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, PROGRAMS: tl.constexpr,
    GATED: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[N] = norm(x[K]) · weight[N, K]ᵀ, plus bias[N] (if BIAS). The norm needs no pass of its own:
    W·(g·x/s) = (W·(g·x))/s, where g is the norm's gain[K], and s is the root mean square of x.

    GATED: weight[2 N, K] has the N rows of the gate and then the N rows of up, and out = silu(gate) · up.
    `LlamaRows.fits` accepts only layers without a bias here.
    """
    # 1. The weights of this program's first ROWS rows, which no kernel of the step writes.
    column = tl.arange(0, PADDED)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tile = load_rows(weight, row.to(tl.int64), column, N, K)
    up_tile = tile
    if GATED:
        up_tile = load_rows(weight + N * K, row.to(tl.int64), column, N, K)
    gains = tl.load(gain + column, mask=column < K, other=0.0)
    release(PDL)
    # 2. The residual[PADDED], and rstd: 1 / the root mean square of x.
    wait(PDL)
    residual = tl.load(x + column, mask=column < K, other=0.0)
    rstd = tl.rsqrt(tl.sum(residual * residual, 0) / K + eps)
    scaled = residual * gains.to(tl.float32)  # [PADDED]
    # 3. ROWS rows at a time. The weights of the next rows, if there are any, are loaded while these are
    #    computed.
    for start in range(tl.program_id(0) * ROWS, N, PROGRAMS * ROWS):
        row = start + tl.arange(0, ROWS)
        if PROGRAMS * ROWS < N:
            next_row = (row + PROGRAMS * ROWS).to(tl.int64)
            next_tile = load_rows(weight, next_row, column, N, K)
            next_up_tile = next_tile
            if GATED:
                next_up_tile = load_rows(weight + N * K, next_row, column, N, K)
        product = tl.sum(tile.to(tl.float32) * scaled[None, :], 1) * rstd
        if GATED:
            up_sum = tl.sum(up_tile.to(tl.float32) * scaled[None, :], 1) * rstd
            product = product * tl.sigmoid(product) * up_sum
        if BIAS:
            product += tl.load(bias + row, mask=row < N, other=0.0).to(tl.float32)
        tl.store(out + row, product.to(out.dtype.element_ty), mask=row < N)
        if PROGRAMS * ROWS < N:
            tile, up_tile = next_tile, next_up_tile


@triton.jit
def _linear_add(
    a, weight, x,
    N: tl.constexpr, K: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, PROGRAMS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """x[N] += a[K] · weight[N, K]ᵀ."""
    column = tl.arange(0, PADDED)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tile = load_rows(weight, row.to(tl.int64), column, N, K)
    release(PDL)
    wait(PDL)
    vector = tl.load(a + column, mask=column < K, other=0.0).to(tl.float32)
    for start in range(tl.program_id(0) * ROWS, N, PROGRAMS * ROWS):
        row = start + tl.arange(0, ROWS)
        residual = tl.load(x + row, mask=row < N, other=0.0)  # [ROWS]
        if PROGRAMS * ROWS < N:
            next_tile = load_rows(weight, (row + PROGRAMS * ROWS).to(tl.int64), column, N, K)
        tl.store(x + row, residual + tl.sum(tile.to(tl.float32) * vector[None, :], 1), mask=row < N)
        if PROGRAMS * ROWS < N:
            tile = next_tile
