"""Dropout masks that a kernel makes where it needs them: Philox by (seed, row, column).

An entry's fate depends on nothing else, so forward and backward agree without a stored mask, and
whatever their tiles are. One Philox call (Salmon et al., SC 2011; 7 rounds, which pass its authors'
BigCrush runs) gives 128 bits, 16 for each of 8 neighbours: the probability is met to 2**-17.
"""

# ruff: noqa: ANN001, ANN201  a kernel's arguments are device values without a Python type

import torch
import triton
import triton.language as tl
from torch import Tensor


def draw_seed(device: torch.device) -> Tensor:
    """Return (1,) int64 from torch's default generator of the device, without a wait for it."""
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)


def draw_key(device: torch.device) -> int:
    """Return a key for `keep_mask` from torch's default generator of the device, on the host.

    On a GPU no kernel runs: the generator's seed and offset make the key, and the offset moves on.
    Always in [2**62, 2**63), so that a kernel's argument has one type.

    Raises:
        RuntimeError: while a CUDA graph is captured, where the offset is not the host's.
    """
    if device.type != "cuda":
        return int(torch.randint(2**62, 2**63 - 1, (1,)))
    generator = torch.cuda.default_generators[device.index]
    offset = generator.get_offset()
    generator.set_offset(offset + 4)  # CUDA generators count in fours
    # a Weyl sequence per seed: distinct keys are all that Philox needs
    return (generator.initial_seed() + 0x9E3779B97F4A7C15 * (offset + 1)) % 2**62 + 2**62


def drop_below(probability: float) -> int:
    """Return the 32-bit draw from which on an entry is kept, a multiple of 2**16.

    Never 0 and never so high that nothing is kept.

    Args:
        probability: of zeroing an entry, in (0, 1).
    """
    return min(max(round(probability * 2**16), 1), 2**16 - 1) << 16


@triton.jit
def keep_mask(seed, row, drop_below, ROWS: tl.constexpr, BLOCK: tl.constexpr, first=0):
    """Which entries of rows `row` (ROWS,) are kept, (ROWS, BLOCK); BLOCK a multiple of 8.

    first: the tile's first column, a multiple of 8.
    """
    group = (first // 8 + tl.arange(0, BLOCK // 8))[None, :].to(tl.uint32)
    r0, r1, r2, r3 = _philox(seed, group, row[:, None].to(tl.uint32))
    words = tl.join(tl.join(r0, r1), tl.join(r2, r3))
    draws = tl.join(words << 16, words)  # the limit has no low bits, so these need no masking
    return tl.reshape(draws, [ROWS, BLOCK]) >= drop_below


@triton.jit
def _philox(seed, c0, c1):
    """Four uint32 of Philox 4x32-7 for the counter (c0, c1, 0, 0) and a 64-bit key."""
    key = seed.to(tl.uint64)
    k0 = (key & 0xFFFFFFFF).to(tl.uint32)
    k1 = (key >> 32).to(tl.uint32)
    c0, c1 = tl.broadcast(c0, c1)
    c2 = c0 * 0
    c3 = c2
    for _ in tl.static_range(7):
        high0, low0 = _multiply(c0, 0xD2511F53)
        high1, low1 = _multiply(c2, 0xCD9E8D57)
        c0 = high1 ^ c1 ^ k0
        c2 = high0 ^ c3 ^ k1
        c1 = low1
        c3 = low0
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def _multiply(x, factor: tl.constexpr):
    """High and low word of a 32-bit product: one instruction on a GPU."""
    product = x.to(tl.uint64) * factor
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)
