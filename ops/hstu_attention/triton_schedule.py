"""The order in which the attention kernels visit their blocks: made on the device, without a wait.

A block is BLOCK consecutive rows (or keys) of one user. Its level is its number, so under a causal
mask the work of a row block grows with its level, and that of key block j is as large as that of
row block (number of blocks - 1 - j): one table serves both.

    chunk   users whose first row falls into the same `chunk_rows` rows: their keys and values
            stay in the L2 cache while the chunk runs
    order   chunk by chunk; inside one highest level (longest work) first; inside a level by user;
            level 0 before all others where contextual rows, which are there, see all columns

So lengths of any skew end evenly, whatever order the users came in. The plain kernels run the whole
list once a head, the Gluon ones every block in all heads before the next. The list is sized by what
the host knows: at most T // BLOCK + B blocks.

Layout, int32: [number of blocks, counters of kernels that draw their blocks (zero), user 0, level
0, user 1, level 1, ...]; the rest is not written.
"""

# ruff: noqa: ANN001  a kernel's arguments are device values without a Python type

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.triton_launch import launch, next_power_of_2

_L2_BYTES = 32 << 20  # two thirds of a Hopper's L2
HEADER = tl.constexpr(4)
"""Words before the first block: the number of blocks, then a counter for each kernel below."""
COUNTERS = {"forward": 1, "keys": 2, "rows": 3}


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Blocks of one size in the order they should start."""

    table: Tensor
    """int32, as the module docstring lays it out."""
    max_blocks: int
    """Upper bound of the number of blocks that needs no look at the offsets."""


def build_schedule(
    seq_offsets: Tensor,
    *,
    num_rows: int,
    max_seq_len: int,
    block: int,
    bytes_per_row: int,
    contextuals: Tensor | None,
    candidates: Tensor | None,
    level_0_first: bool = False,
) -> Schedule:
    """Return the schedule of a batch.

    Args:
        seq_offsets: (B + 1,) on the device.
        num_rows: T.
        max_seq_len: a longer sequence, an offset that falls or passes T, and counts that do not fit
            their sequence stop the device with an assertion (the host never reads them).
        block: rows of a block.
        bytes_per_row: bytes of one key and one value row, of the heads that run at the same time.
        contextuals: (B,) or None.
        candidates: (B,) or None.
        level_0_first: the first block of a user has the most work.
    """
    num_users = seq_offsets.numel() - 1
    max_blocks = num_rows // block + num_users
    table = torch.empty(HEADER.value + 2 * max_blocks, dtype=torch.int32, device=seq_offsets.device)
    chunk_rows = max(_L2_BYTES // bytes_per_row, block)
    users_per_step = min(1024, max(16, next_power_of_2(num_users)))
    # never empty: no program, no table and no assertion
    num_levels = max(1, -(-min(max_seq_len, num_rows) // block))
    grid = (num_levels, num_rows // chunk_rows + 1)
    arguments = {
        "offsets_ptr": seq_offsets,
        "contextuals_ptr": contextuals,
        "candidates_ptr": candidates,
        "table_ptr": table,
        "num_users": num_users,
        "num_rows": num_rows,
        "max_seq_len": max_seq_len,
        "chunk_rows": chunk_rows,
        "BLOCK": block,
        "LEVEL_0_FIRST": level_0_first,
        "USERS": users_per_step,
    }
    launch(_schedule_kernel, grid, arguments, num_warps=4)
    return Schedule(table=table, max_blocks=max_blocks)


@triton.jit
def _sum(x):
    return tl.reduce(x, 0, tl.standard._sum_combine)


@triton.jit
def _num_blocks(offsets_ptr, users, num_users, BLOCK: tl.constexpr):
    start = tl.load(offsets_ptr + users, mask=users < num_users, other=0).to(tl.int64)
    end = tl.load(offsets_ptr + users + 1, mask=users < num_users, other=0).to(tl.int64)
    return start, ((end - start + BLOCK - 1) // BLOCK).to(tl.int32), (end - start).to(tl.int32)


@triton.jit(debug=True, do_not_specialize=["num_users", "num_rows", "max_seq_len"])
def _schedule_kernel(
    offsets_ptr,
    contextuals_ptr,
    candidates_ptr,
    table_ptr,
    num_users,
    num_rows,
    max_seq_len,
    chunk_rows,
    BLOCK: tl.constexpr,
    LEVEL_0_FIRST: tl.constexpr,
    USERS: tl.constexpr,
):
    """Write the blocks of one level of one chunk to their places."""
    level = tl.program_id(0)
    chunk = tl.program_id(1)
    lane = tl.arange(0, USERS)
    before = tl.program_id(0) * 0
    total = before
    for first_user in range(0, num_users, USERS):
        users = first_user + lane
        start, blocks, length = _num_blocks(offsets_ptr, users, num_users, BLOCK)
        own = start // chunk_rows
        earlier = tl.maximum(blocks - level - 1, 0)
        if LEVEL_0_FIRST:
            earlier = tl.where(level == 0, 0, earlier + (blocks > 0).to(tl.int32))
        before += _sum(tl.where(own < chunk, blocks, tl.where(own == chunk, earlier, 0)))
        total += _sum(blocks)
        if (level == 0) & (chunk == 0):
            _check(
                contextuals_ptr,
                candidates_ptr,
                users,
                num_users,
                start,
                length,
                num_rows,
                max_seq_len,
            )
    for first_user in range(0, num_users, USERS):
        users = first_user + lane
        start, blocks, _ = _num_blocks(offsets_ptr, users, num_users, BLOCK)
        emits = (start // chunk_rows == chunk) & (blocks > level)
        rank = tl.associative_scan(emits.to(tl.int32), 0, tl.standard._sum_combine)
        place = table_ptr + HEADER + 2 * (before + rank - 1)
        tl.store(place, users, mask=emits)
        tl.store(place + 1, lane * 0 + level, mask=emits)
        before += _sum(emits.to(tl.int32))
    if (level == 0) & (chunk == 0):
        tl.store(table_ptr, total)
        for counter in tl.static_range(1, HEADER):
            tl.store(table_ptr + counter, 0)


@triton.jit
def _check(contextuals_ptr, candidates_ptr, users, num_users, start, length, num_rows, max_seq_len):
    is_user = users < num_users
    taken = length * 0
    least = taken
    if contextuals_ptr is not None:
        count = tl.load(contextuals_ptr + users, mask=is_user, other=0).to(tl.int32)
        taken += count
        least = tl.minimum(least, count)
    if candidates_ptr is not None:
        count = tl.load(candidates_ptr + users, mask=is_user, other=0).to(tl.int32)
        taken += count
        least = tl.minimum(least, count)
    tl.device_assert((users > 0) | (start == 0), "hstu_attention: seq_offsets must start at 0")
    tl.device_assert(least >= 0, "hstu_attention: counts must not be negative")
    tl.device_assert(length >= 0, "hstu_attention: seq_offsets must not fall")
    tl.device_assert(start + length <= num_rows, "hstu_attention: seq_offsets pass the rows of q")
    tl.device_assert(length <= max_seq_len, "hstu_attention: a sequence is longer than max_seq_len")
    tl.device_assert(taken <= length, "hstu_attention: more contextuals and candidates than tokens")
