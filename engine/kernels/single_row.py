"""A decode step of one sequence as a chain of few kernels, each waiting as little as it can for the last.
Part 13: what tuning adds for a batch of one.

With one row, a step reads every weight once and computes next to nothing, so the gaps between kernels are
what is left to save. Promises GPT-2's numbers up to rounding. Two kinds of kernel beside attention: a norm
with the linear layer behind it, and a linear layer with the residual sum. On Hopper each is launched before
its predecessor has ended (programmatic dependent launch): weights, which no predecessor writes, are on their
way when `gdc_wait` returns. Residuals and sums are in fp32. Document:
https://docs.nvidia.com/cuda/cuda-c-programming-guide/#programmatic-dependent-launch-and-synchronization
"""

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

RESIDENT = 8  # programs of four warps on a multiprocessor, at 64 registers each


@triton.jit
def _wait(PDL: tl.constexpr):
    """From here on, what earlier kernels wrote may be read, and anything written."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def _release(PDL: tl.constexpr):
    """The next kernel may be launched."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _gelu(x):
    """GPT-2's: tanh as 1 - 2 / (exp(2u) + 1), which neither overflows nor loses small numbers' sign."""
    u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x * (1 - 1 / (tl.exp(2 * u) + 1))


@triton.jit
def _embed(token_ids, positions, embed, embed_position, x, D: tl.constexpr, PADDED: tl.constexpr):
    i = tl.arange(0, PADDED)
    inside = i < D
    token, position = tl.load(token_ids).to(tl.int64), tl.load(positions).to(tl.int64)
    word = tl.load(embed + token * D + i, mask=inside, other=0.0).to(tl.float32)
    place = tl.load(embed_position + position * D + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(x + i, word + place, mask=inside)


@triton.jit
def _norm_linear(
    x, weight, gain, weight_gain, weight_bias, out, keys, values, slots, eps,
    N: tl.constexpr, K: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, PROGRAMS: tl.constexpr,
    QKV: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[N] = norm(x[K]) · weight[N, K]ᵀ + bias, without a pass for the norm:
    W·(g·(x - m)/s + b) + c = (W·(g·x) - m·(W·g))/s + (W·b + c), where W·g and W·b + c are known at load.

    With QKV the second and third third of `out` are this token's key and value, and go to its slot.
    """
    # 1. Weights of my first rows, before anything that depends on the step.
    _release(PDL)
    k = tl.arange(0, PADDED)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (k < K)[None, :]
    w = tl.load(weight + row[:, None] * K + k[None, :], mask=inside & (row < N)[:, None], other=0.0)
    g = tl.load(gain + k, mask=k < K, other=0.0)
    # 2. The residual, and the norm's two numbers.
    _wait(PDL)
    a = tl.load(x + k, mask=k < K, other=0.0)
    mean = tl.sum(a, 0) / K
    rstd = tl.rsqrt(tl.sum(a * a, 0) / K - mean * mean + eps)
    a = a * g
    # 3. Row by row, the next rows' weights on their way.
    for start in range(tl.program_id(0) * ROWS, N, PROGRAMS * ROWS):
        row = start + tl.arange(0, ROWS)
        later = row + PROGRAMS * ROWS
        if PROGRAMS * ROWS < N:
            ahead = tl.load(
                weight + later[:, None] * K + k[None, :], mask=inside & (later < N)[:, None], other=0.0
            )
        y = tl.sum(w.to(tl.float32) * a[None, :], 1)
        y = (y - mean * tl.load(weight_gain + row, mask=row < N, other=0.0)) * rstd
        y += tl.load(weight_bias + row, mask=row < N, other=0.0)
        if GELU:
            y = _gelu(y)
        y = y.to(out.dtype.element_ty)
        if QKV:
            slot = tl.load(slots).to(tl.int64)
            third: tl.constexpr = N // 3
            tl.store(out + row, y, mask=row < third)
            tl.store(keys + slot * third + row - third, y, mask=(row >= third) & (row < 2 * third))
            tl.store(values + slot * third + row - 2 * third, y, mask=(row >= 2 * third) & (row < N))
        else:
            tl.store(out + row, y, mask=row < N)
        if PROGRAMS * ROWS < N:
            w = ahead


@triton.jit
def _linear_add(
    a, weight, bias, x,
    N: tl.constexpr, K: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, PROGRAMS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """x[N] += a[K] · weight[N, K]ᵀ + bias."""
    k = tl.arange(0, PADDED)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (k < K)[None, :]
    w = tl.load(weight + row[:, None] * K + k[None, :], mask=inside & (row < N)[:, None], other=0.0)
    b = tl.load(bias + row, mask=row < N, other=0.0).to(tl.float32)
    _release(PDL)
    _wait(PDL)
    vector = tl.load(a + k, mask=k < K, other=0.0).to(tl.float32)
    for start in range(tl.program_id(0) * ROWS, N, PROGRAMS * ROWS):
        row = start + tl.arange(0, ROWS)
        later = row + PROGRAMS * ROWS
        if PROGRAMS * ROWS < N:
            ahead = tl.load(
                weight + later[:, None] * K + k[None, :], mask=inside & (later < N)[:, None], other=0.0
            )
        next_bias = tl.load(bias + later, mask=later < N, other=0.0).to(tl.float32)
        before = tl.load(x + row, mask=row < N, other=0.0)
        y = before + tl.sum(w.to(tl.float32) * vector[None, :], 1) + b
        tl.store(x + row, y, mask=row < N)
        b = next_bias
        if PROGRAMS * ROWS < N:
            w = ahead


@triton.jit
def _attend(
    q, keys, values, tables, lens, out, parts, stats, arrived, scale,
    H: tl.constexpr, DH: tl.constexpr, P: tl.constexpr, TOKENS: tl.constexpr, SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """As `paged_attention`, one sequence whose query heads have a key head each; the part that comes last
    joins all parts, which saves a kernel.
    """
    head, part = tl.program_id(0), tl.program_id(1)
    d, i = tl.arange(0, DH), tl.arange(0, TOKENS)
    length = tl.load(lens)
    share = tl.cdiv(tl.cdiv(length, SPLITS), TOKENS) * TOKENS
    first = part * share
    last = tl.minimum(first + share, length)
    _release(PDL)
    if first >= length:
        return
    _wait(PDL)
    query = tl.load(q + head * DH + d).to(tl.float32) * scale
    maximum = tl.full([1], -float("inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    weighted = tl.zeros([DH], tl.float32)
    for start in range(first, last, TOKENS):
        token = start + i
        there = token < last
        block = tl.load(tables + token // P, mask=there, other=0).to(tl.int64)
        address = ((block * P + token % P) * H + head)[:, None] * DH + d[None, :]
        k = tl.load(keys + address, mask=there[:, None], other=0.0).to(tl.float32)
        v = tl.load(values + address, mask=there[:, None], other=0.0).to(tl.float32)
        scores = tl.where(there, tl.sum(k * query[None, :], 1), -float("inf"))
        new = tl.maximum(maximum, tl.max(scores, 0))
        shrink = tl.exp(maximum - new)
        weights = tl.exp(scores - new)
        total = total * shrink + tl.sum(weights, 0)
        weighted = weighted * shrink + tl.sum(v * weights[:, None], 0)
        maximum = new
    own = head * SPLITS + part + tl.arange(0, 1)
    tl.store(parts + (head * SPLITS + part) * DH + d, weighted)
    tl.store(stats + own, maximum)
    tl.store(stats + H * SPLITS + own, total)
    tl.debug_barrier()
    parts_there = tl.cdiv(length, share)
    if tl.atomic_add(arrived + head, 1) == parts_there - 1:
        s = tl.arange(0, SPLITS)
        there = s < parts_there
        m = tl.load(stats + head * SPLITS + s, mask=there, other=-float("inf"), volatile=True)
        t = tl.load(stats + H * SPLITS + head * SPLITS + s, mask=there, other=0.0, volatile=True)
        w = tl.load(
            parts + (head * SPLITS + s)[:, None] * DH + d[None, :],
            mask=there[:, None],
            other=0.0,
            volatile=True,
        )
        factor = tl.exp(m - tl.max(m, 0))
        mean = tl.sum(w * factor[:, None], 0) / tl.sum(t * factor, 0)
        tl.store(out + head * DH + d, mean.to(out.dtype.element_ty))
        tl.store(arrived + head, 0)


class SingleRow:
    """GPT-2's forward pass of one sequence's next token, over buffers whose addresses never change."""

    def __init__(self, model: nn.Module, keys: list[Tensor], values: list[Tensor]) -> None:
        """keys and values by layer: [B, P, H, Dh]."""
        config = self.config = model.config
        device, dtype = model.embed.weight.device, model.embed.weight.dtype
        D, H, Dh = config.hidden_size, config.num_heads, config.head_dim
        self.model, self.keys, self.values = model, keys, values
        self.pdl = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
        self.resident = 4  # the interpreter runs them one after the other
        if device.type == "cuda":
            self.resident = RESIDENT * torch.cuda.get_device_properties(device).multi_processor_count
        self.splits = 8

        def fold(norm: nn.Module, linear: nn.Module) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            weight, bias = linear.weight.float(), linear.bias
            shift = weight @ norm.bias.float()
            shift = shift if bias is None else shift + bias.float()
            return linear.weight, norm.weight.float(), weight @ norm.weight.float(), shift

        self.layers = [
            (
                fold(block.norm1, block.attention.qkv), block.attention.proj,
                fold(block.norm2, block.mlp.up), block.mlp.down,
            )
            for block in model.blocks
        ]  # fmt: skip
        self.head = fold(model.norm, model.head)
        self.x = torch.empty(D, device=device)
        self.q = torch.empty(D, device=device, dtype=dtype)
        self.attended = torch.empty(D, device=device, dtype=dtype)
        self.inner = torch.empty(config.intermediate_size, device=device, dtype=dtype)
        self.parts = torch.empty(H * self.splits * Dh, device=device)
        self.stats = torch.empty(2 * H * self.splits, device=device)
        self.arrived = torch.zeros(H, device=device, dtype=torch.int32)
        self.logits = torch.empty(1, config.vocab_size, device=device)

    def __call__(
        self, token_ids: Tensor, positions: Tensor, slots: Tensor, tables: Tensor, lens: Tensor
    ) -> Tensor:
        """Each [1], tables[1, W] -> logits[1, V]."""
        c, model = self.config, self.model
        D = c.hidden_size
        _embed[(1,)](
            token_ids, positions, model.embed.weight, model.embed_position.weight, self.x,
            D=D, PADDED=triton.next_power_of_2(D), num_warps=8,
        )  # fmt: skip
        for layer, (qkv, proj, up, down) in enumerate(self.layers):
            keys, values = self.keys[layer], self.values[layer]
            self._norm_linear(qkv, self.q, keys, values, slots, qkv=True)
            _attend[(c.num_heads, self.splits)](
                self.q, keys, values, tables, lens, self.attended, self.parts, self.stats, self.arrived,
                c.head_dim**-0.5, H=c.num_heads, DH=c.head_dim, P=keys.shape[1], TOKENS=64,
                SPLITS=self.splits, PDL=self.pdl, num_warps=2, launch_pdl=self.pdl,
            )  # fmt: skip
            self._linear_add(self.attended, proj, rows=4)
            self._norm_linear(up, self.inner, keys, values, slots, gelu=True)
            self._linear_add(self.inner, down, rows=1)
        keys = self.keys[0]
        self._norm_linear(self.head, self.logits, keys, keys, slots, rows=8, walk=False)
        return self.logits

    def _norm_linear(self, folded, out, keys, values, slots, qkv=False, gelu=False, rows=2, walk=True):
        weight, gain, weight_gain, weight_bias = folded
        N, K = weight.shape
        programs = self._programs(N, rows, walk)
        _norm_linear[(programs,)](
            self.x, weight, gain, weight_gain, weight_bias, out, keys, values, slots, self.config.norm_eps,
            N=N, K=K, PADDED=triton.next_power_of_2(K), ROWS=rows, PROGRAMS=programs,
            QKV=qkv, GELU=gelu, PDL=self.pdl, num_warps=4, launch_pdl=self.pdl,
        )  # fmt: skip

    def _linear_add(self, a: Tensor, linear: nn.Module, rows: int) -> None:
        N, K = linear.weight.shape
        programs = self._programs(N, rows, walk=False)
        _linear_add[(programs,)](
            a, linear.weight, linear.bias, self.x, N=N, K=K, PADDED=triton.next_power_of_2(K), ROWS=rows,
            PROGRAMS=programs, PDL=self.pdl, num_warps=4, launch_pdl=self.pdl,
        )  # fmt: skip

    def _programs(self, N: int, rows: int, walk: bool) -> int:
        """One for each `rows` rows of weights, or as many as fit on the card at once and walk over them."""
        tiles = triton.cdiv(N, rows)
        return min(tiles, self.resident) if walk or not self.pdl else tiles
