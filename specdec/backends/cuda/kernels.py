"""The kernels of this backend, in Triton. Importing this module needs triton.

Arguments in capitals are constants of a compiled kernel. A program of ``attend`` computes an item (plan.py) for one
key head and HEADS of its query heads: ROWS * HEADS lanes, one for each row and head. Runs are combined from left to
right by one formula, in one program or in ``combine``, so both give the same bits.
"""

import triton
import triton.language as tl

NOTHING = tl.constexpr(float("-inf"))
NO_TOKEN = tl.constexpr(2147483647)


@triton.jit
def store(
    key, value, keys, values, slots, key_row, key_head, value_row, value_head,
    KV_HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A program stores the key and value of one row in its slot, NaN and infinity as 0."""
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    n = tl.arange(0, WIDTH)
    real = n < KV_HEADS * D
    head, d = n // D, n % D
    new_key = tl.load(key + row * key_row + head * key_head + d, mask=real, other=0.0)
    new_value = tl.load(value + row * value_row + head * value_head + d, mask=real, other=0.0)
    new_key = tl.where(tl.abs(new_key.to(tl.float32)) < float("inf"), new_key, 0.0)
    new_value = tl.where(tl.abs(new_value.to(tl.float32)) < float("inf"), new_value, 0.0)
    at = slot * KV_HEADS * D + n
    tl.store(keys + at, new_key.to(keys.dtype.element_ty), mask=real)
    tl.store(values + at, new_value.to(values.dtype.element_ty), mask=real)


@triton.jit
def _joined(top, total, acc, new_top, new_total, new_acc):
    """Two softmaxes over different keys as one: their largest scores, sums of weights, and weighted sums of values."""
    both = tl.maximum(top, new_top)
    safe = tl.where(both == NOTHING, 0.0, both)
    old, new = tl.exp(top - safe), tl.exp(new_top - safe)
    return both, total * old + new_total * new, acc * old[:, None] + new_acc * new[:, None]


@triton.jit
def _run(
    q, keys, values, blocks, tails, tail_from, num_keys, position, real, scale, window, softcap, first, end, kv,
    KV_HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
    STEP: tl.constexpr, DOT: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """The softmax of all lanes over the keys from ``first`` to ``end``."""
    top = tl.full([LANES], NOTHING, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    acc = tl.zeros([LANES, WIDTH], tl.float32)
    d = tl.arange(0, WIDTH)
    for start in range(first, end, STEP):
        p = start + tl.arange(0, STEP)
        there = p < num_keys
        block = tl.load(blocks + p // BLOCK, mask=there & (p < tail_from), other=0)
        tail = tl.load(tails + p - tail_from, mask=there & (p >= tail_from), other=0)
        slot = tl.where(p < tail_from, block * BLOCK + p % BLOCK, tail).to(tl.int64)
        at = (slot * KV_HEADS + kv)[:, None] * D + d[None, :]
        real_at = there[:, None] & (d < D)[None, :]
        k = tl.load(keys + at, mask=real_at, other=0.0).to(DOT)
        score = tl.dot(q, tl.trans(k), input_precision="ieee").to(tl.float32) * scale
        if SOFTCAP:
            score = softcap - 2.0 * softcap / (tl.exp(2.0 * score / softcap) + 1.0)
        distance = position[:, None] - p[None, :]
        score = tl.where((distance >= 0) & (distance < window) & real[:, None], score, NOTHING)
        new_top = tl.maximum(top, tl.max(score, 1))
        safe = tl.where(new_top == NOTHING, 0.0, new_top)
        weight = tl.exp(score - safe[:, None])
        kept = tl.exp(top - safe)
        v = tl.load(values + at, mask=real_at, other=0.0).to(DOT)
        acc = acc * kept[:, None] + tl.dot(weight.to(DOT), v, input_precision="ieee").to(tl.float32)
        total = total * kept + tl.sum(weight, 1)
        top = new_top
    return top, total, acc


@triton.jit
def attend(
    query, keys, values, out, chains, chain_rows, items, blocks, part_top, part_total, part_acc,
    query_row, query_head, out_row, out_head, scale, window, softcap,
    KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, HEADS: tl.constexpr, RUN: tl.constexpr, STEP: tl.constexpr, DOT: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """A program writes the attention of its lanes, or of one run what ``combine`` needs."""
    item, kv, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    chain = tl.load(items + item * 4)
    if chain < 0:
        return
    first_row, run = tl.load(items + item * 4 + 1), tl.load(items + item * 4 + 2)
    about = chains + chain * 6
    num_rows, num_keys, tail_from = tl.load(about + 1), tl.load(about + 2), tl.load(about + 5)
    table, tails = blocks + tl.load(about + 3), blocks + tl.load(about + 4)
    lane = tl.arange(0, ROWS * HEADS)
    row, head = first_row + lane // HEADS, part * HEADS + lane % HEADS
    real = (row < num_rows) & (head < GROUPS)
    position = num_keys - num_rows + row
    at = tl.load(chain_rows + tl.load(about) + row, mask=real, other=0)
    d = tl.arange(0, WIDTH)
    real_at = real[:, None] & (d < D)[None, :]
    q = tl.load(
        query + at[:, None] * query_row + (kv * GROUPS + head)[:, None] * query_head + d[None, :],
        mask=real_at, other=0.0,
    ).to(DOT)  # fmt: skip
    last = tl.minimum(num_keys, num_keys - num_rows + first_row + ROWS)
    begin = tl.maximum(0, num_keys - num_rows + first_row - window + 1) // RUN
    end = (last + RUN - 1) // RUN
    if run >= 0:
        begin = tl.maximum(begin, run)
        end = tl.minimum(end, run + 1)
    top = tl.full([ROWS * HEADS], NOTHING, tl.float32)
    total = tl.zeros([ROWS * HEADS], tl.float32)
    acc = tl.zeros([ROWS * HEADS, WIDTH], tl.float32)
    for number in range(begin, end):
        new_top, new_total, new_acc = _run(
            q, keys, values, table, tails, tail_from, num_keys, position, real, scale, window, softcap,
            number * RUN, tl.minimum(number * RUN + RUN, last), kv,
            KV_HEADS, D, WIDTH, ROWS * HEADS, BLOCK, STEP, DOT, SOFTCAP,
        )  # fmt: skip
        top, total, acc = _joined(top, total, acc, new_top, new_total, new_acc)
    if run >= 0:
        slot = ((item * KV_HEADS + kv) * tl.num_programs(2) + part) * ROWS * HEADS + lane
        tl.store(part_top + slot, top)
        tl.store(part_total + slot, total)
        tl.store(part_acc + slot[:, None] * WIDTH + d[None, :], acc)
    else:
        _write(out, at, kv * GROUPS + head, total, acc, d, real_at, out_row, out_head)


@triton.jit
def _write(out, at, head, total, acc, d, real_at, out_row, out_head):
    """A lane that sees nothing, as of padding, writes 0."""
    attended = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    where = out + at[:, None] * out_row + head[:, None] * out_head + d[None, :]
    tl.store(where, attended.to(out.dtype.element_ty), mask=real_at)


@triton.jit
def combine(
    out, chains, chain_rows, items, part_top, part_total, part_acc, out_row, out_head,
    KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """The program of an item's first run combines all of its runs."""
    item, kv, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    chain, run = tl.load(items + item * 4), tl.load(items + item * 4 + 2)
    if (chain < 0) | (run != 0):
        return
    first_row, num_runs = tl.load(items + item * 4 + 1), tl.load(items + item * 4 + 3)
    lane = tl.arange(0, ROWS * HEADS)
    row, head = first_row + lane // HEADS, part * HEADS + lane % HEADS
    real = (row < tl.load(chains + chain * 6 + 1)) & (head < GROUPS)
    at = tl.load(chain_rows + tl.load(chains + chain * 6) + row, mask=real, other=0)
    d = tl.arange(0, WIDTH)
    top = tl.full([ROWS * HEADS], NOTHING, tl.float32)
    total = tl.zeros([ROWS * HEADS], tl.float32)
    acc = tl.zeros([ROWS * HEADS, WIDTH], tl.float32)
    for number in range(0, num_runs):
        slot = (((item + number) * KV_HEADS + kv) * tl.num_programs(2) + part) * ROWS * HEADS + lane
        new_acc = tl.load(part_acc + slot[:, None] * WIDTH + d[None, :])
        new_top, new_total = tl.load(part_top + slot), tl.load(part_total + slot)
        top, total, acc = _joined(top, total, acc, new_top, new_total, new_acc)
    _write(out, at, kv * GROUPS + head, total, acc, d, real[:, None] & (d < D)[None, :], out_row, out_head)


@triton.jit
def race(
    logits, row_stride, vocab_size, seeds, positions, temperatures, scores, tokens,
    BLOCK: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """A program finds the COUNT leading tokens in a block of one row's tokens: by logits at temperature 0, else by
    log-weight minus the logarithm of the token's exponential (specdec.core.noise, Domain.COUPLED)."""
    row, block = tl.program_id(0), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    there = token < vocab_size
    logit = tl.load(logits + row.to(tl.int64) * row_stride + token, mask=there, other=NOTHING)
    logit = logit.to(tl.float32).to(tl.float64)
    zero = tl.zeros([BLOCK], tl.uint32)
    position = zero + tl.load(positions + row).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(tl.load(seeds + row), position, zero, (token // 4).to(tl.uint32), zero)
    word = tl.where(token % 4 == 0, w0, tl.where(token % 4 == 1, w1, tl.where(token % 4 == 2, w2, w3)))
    uniform = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    exponential = -tl.log(1.0 - uniform)  # 1 - u is exact
    temperature = tl.load(temperatures + row)
    drawn = logit / tl.where(temperature > 0.0, temperature, 1.0) - tl.log(exponential)
    _leading(tl.where(temperature > 0.0, drawn, logit), token, there, scores, tokens,
             (row * tl.num_programs(1) + block) * COUNT, COUNT)  # fmt: skip


@triton.jit
def leaders(part_scores, part_tokens, scores, tokens, num_parts, PARTS: tl.constexpr, COUNT: tl.constexpr):
    """A program finds the COUNT leading tokens of one row among those of its blocks."""
    row, n = tl.program_id(0), tl.arange(0, PARTS)
    there = n < num_parts
    score = tl.load(part_scores + row * num_parts + n, mask=there, other=NOTHING)
    token = tl.load(part_tokens + row * num_parts + n, mask=there, other=0)
    _leading(score, token, there, scores, tokens, row * COUNT, COUNT)


@triton.jit
def _leading(score, token, there, scores, tokens, at, COUNT: tl.constexpr):
    """Store the tokens with the COUNT highest scores, of ties the lowest token first."""
    score = tl.where(there, score, NOTHING)
    for number in tl.static_range(COUNT):
        best = tl.max(score, 0)
        who = tl.min(tl.where(there & (score == best), token, NO_TOKEN), 0)
        tl.store(scores + at + number, best)
        tl.store(tokens + at + number, tl.where(who == NO_TOKEN, 0, who))  # NaN equals nothing
        there = there & (token != who)
        score = tl.where(there, score, NOTHING)
