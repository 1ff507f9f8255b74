"""Attention of `llama_row.py`'s chain: one new token, norm, rotation and store included. Part 20.

As `llama_attend.py`, but a key head's tokens are split among several programs, and the program that ends last
joins their parts. So no kernel is launched for the joining, and one sequence keeps the whole GPU busy.
"""

import triton
import triton.language as tl

from engine.kernels.llama_attend import load_normed_token
from engine.kernels.paged_attention import tokens_per_part
from engine.kernels.pdl import release, wait
from engine.kernels.running_softmax import add_tile, merge_parts


@triton.jit
def _load_tile(
    keys, values, tables, token, end, head, HKV: tl.constexpr, HALF: tl.constexpr, P: tl.constexpr
):
    """Load both halves of keys, [TOKENS, HALF] each, and values[TOKENS, DH], at key head `head` and the
    positions token[TOKENS]; 0 from position `end` on.
    """
    DH: tl.constexpr = 2 * HALF
    pair, dim = tl.arange(0, HALF), tl.arange(0, DH)
    valid = token < end  # [TOKENS]
    block = tl.load(tables + token // P, mask=valid, other=0).to(tl.int64)  # [TOKENS]
    address = ((block * P + token % P) * HKV + head)[:, None] * DH  # [TOKENS, 1]
    ka = tl.load(keys + address + pair[None, :], mask=valid[:, None], other=0.0)
    kb = tl.load(keys + address + HALF + pair[None, :], mask=valid[:, None], other=0.0)
    v = tl.load(values + address + dim[None, :], mask=valid[:, None], other=0.0)
    return ka, kb, v


@triton.jit
def attend_row(
    qkv, cos_sin, q_gain, k_gain, keys, values, slots, tables, lens, out, parts, maxima, totals, arrived,
    eps, scale,
    HQ: tl.constexpr, HKV: tl.constexpr, HALF: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr,
    NORM: tl.constexpr, SPLITS: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (key head, part): the queries that share the key head attend to a part of the tokens.

    The last part has the new token, and stores its key and value in the place slots[0]; -1 stores nothing.
    The program that ends last joins the parts and writes out[HQ, DH]. qkv[(HQ + 2 · HKV) · DH] is the new
    token's, cos_sin[2, HALF] the cosines and sines of its angles, and lens[0] its context with itself.
    tables[W]; keys and values[B, P, HKV, DH]; parts[HQ, SPLITS, DH], maxima and totals[HQ, SPLITS] are
    scratch, and arrived[HKV] is 0 before and after. ROWS is the least power of two from 16 on that holds the
    queries of a key head. In names, qa and qb are the two halves of queries, and ka and kb those of keys.
    """
    # 1. This program's key head and part: the tokens first:last, of which first:end are old tokens.
    DH: tl.constexpr = 2 * HALF
    GROUP: tl.constexpr = HQ // HKV
    head, part = tl.program_id(0), tl.program_id(1)
    length = tl.load(lens)
    share = tokens_per_part(length, SPLITS, TOKENS)
    first = part * share
    release(PDL)
    if first >= length:
        return
    last = tl.minimum(first + share, length)
    has_new = last == length
    end = tl.minimum(last, length - 1)
    # 2. Load the first tile of old keys and values.
    offset, group_row = tl.arange(0, TOKENS), tl.arange(0, ROWS)
    pair, dim = tl.arange(0, HALF), tl.arange(0, DH)
    ka, kb, v = _load_tile(keys, values, tables, first + offset, end, head, HKV, HALF, P)
    slot = tl.load(slots).to(tl.int64)
    dtype: tl.constexpr = keys.dtype.element_ty
    # 3. Norm and rotate the new token's queries and key, which the qkv layer has computed. Store the new key
    #    and value in their page.
    wait(PDL)
    qa, qb, new_ka, new_kb, new_value = load_normed_token(
        qkv, cos_sin, cos_sin + HALF, q_gain, k_gain, head, eps, dtype, HQ, HKV, HALF, NORM, ROWS
    )  # [ROWS, HALF] twice, [1, HALF] twice, [DH]
    new_offset = (slot * HKV + head) * DH
    stores_new = has_new & (slot >= 0)
    tl.store(keys + new_offset + pair[None, :], new_ka, mask=stores_new)
    tl.store(keys + new_offset + HALF + pair[None, :], new_kb, mask=stores_new)
    tl.store(values + new_offset + dim, new_value, mask=stores_new)
    # 4. The running softmax: the new token, if this part has it, and then the old tokens.
    score = tl.sum(qa.to(tl.float32) * new_ka.to(tl.float32), 1)  # [ROWS], of the new token
    score += tl.sum(qb.to(tl.float32) * new_kb.to(tl.float32), 1)
    maximum = tl.where(has_new, score * scale, -float("inf"))  # [ROWS]
    total = tl.where(has_new, 1.0, 0.0) + tl.zeros([ROWS], tl.float32)
    weighted = tl.where(has_new, new_value.to(tl.float32)[None, :], 0.0) + tl.zeros([ROWS, DH], tl.float32)
    for start in range(first, end, TOKENS):
        # Load the next tile, and meanwhile add this one.
        next_token = start + TOKENS + offset  # [TOKENS]
        next_ka, next_kb, next_v = _load_tile(keys, values, tables, next_token, end, head, HKV, HALF, P)
        scores = tl.dot(qa, tl.trans(ka), input_precision="ieee")
        scores = tl.dot(qb, tl.trans(kb), scores, input_precision="ieee") * scale  # [ROWS, TOKENS]
        scores = tl.where((start + offset < end)[None, :], scores, -float("inf"))
        maximum, total, weighted = add_tile(scores, v, maximum, total, weighted)
        ka, kb, v = next_ka, next_kb, next_v
    # 5. Store this part of the result. The program that ends last joins all parts.
    index = (head * GROUP + group_row) * SPLITS + part  # [ROWS]
    is_query = group_row < GROUP
    tl.store(parts + index[:, None] * DH + dim[None, :], weighted, mask=is_query[:, None])
    tl.store(maxima + index, maximum, mask=is_query)
    tl.store(totals + index, total, mask=is_query)
    tl.debug_barrier()  # all threads have stored their numbers before the program counts itself
    num_parts = tl.cdiv(length, share)
    if tl.atomic_add(arrived + head, 1) == num_parts - 1:
        for query in range(GROUP):
            row = head * GROUP + query
            mean = merge_parts(parts, maxima, totals, row, num_parts, dim, SPLITS, DH)  # [DH]
            tl.store(out + row * DH + dim, mean.to(out.dtype.element_ty))
        tl.store(arrived + head, 0)  # for the next step
