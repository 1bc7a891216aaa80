"""FP8 operands of attention in plain torch, by loops over users: layouts, scales, codes."""

from dataclasses import dataclass

import torch
from torch import Tensor

FACTOR = 133 / 128
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Operands; what no user owns is zero here and False in the masks."""

    codes: Tensor
    codes_t: Tensor
    scale_inv: Tensor
    owns_row: Tensor
    """(T,)."""
    owns_column: Tensor
    """(columns,), the rest of a user's last sixteen among them."""
    owns_slot: Tensor
    """(slots,)."""


def place_of(position: int) -> int:
    """Return the column of a position, counted from its user's first column."""
    group, inside = divmod(position, 16)
    j, rest = divmod(inside, 8)
    t, e = divmod(rest, 2)
    return 16 * group + 4 * t + 2 * j + e


def scale_inv_of(amax: float, dtype: torch.dtype) -> float:
    """Return the smallest power of two that brings amax within the format, by trying them."""
    if amax == 0:
        return 1.0
    for exponent in range(-120, 61):
        if amax / 2.0**exponent <= LARGEST[dtype]:
            return 2.0**exponent
    return 2.0**60


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return codes, saturated; NaN stays."""
    return x.float().clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)


def expected_operand(
    x_THA: Tensor,
    offsets: list[int],
    *,
    shared: str,
    dtype: torch.dtype = torch.float8_e4m3fn,
    factor: float = FACTOR,
) -> Expected:
    """Return what the quantisers should write.

    Args:
        x_THA: rows on the CPU.
        offsets: of users.
        shared: what shares a maximum: none, block, head or tensor.
        dtype: of the codes.
        factor: of the values before their cast: 1 for dO.
    """
    num_rows, num_heads, width = x_THA.shape
    largest = x_THA.abs() * factor
    num_users = len(offsets) - 1
    columns = -(-16 * (num_rows // 16 + num_users + 1) // 128) * 128
    slots = -(-(num_rows // 128 + num_users + 1) // 4) * 4
    codes = torch.zeros(x_THA.shape, dtype=dtype)
    codes_t = torch.zeros((num_heads, width, columns), dtype=dtype)
    scale_inv = torch.zeros(slots, num_heads)
    owned = [torch.zeros(size, dtype=torch.bool) for size in (num_rows, columns, slots)]
    whole = float(largest[: offsets[-1]].max()) if offsets[-1] else 0.0
    for user, (start, end) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
        for first in range(start, end, 128):
            rows = slice(first, min(first + 128, end))
            slot = start // 128 + user + (first - start) // 128
            owned[2][slot] = True
            for head in range(num_heads):
                amax = float(largest[rows, head].max())
                amax = float(largest[start:end, head].max()) if shared == "head" else amax
                amax = whole if shared == "tensor" else amax
                scale_inv[slot, head] = 1.0 if shared == "none" else scale_inv_of(amax, dtype)
                scaled = x_THA[rows, head] * (factor / scale_inv[slot, head])
                codes[rows, head] = cast(scaled, dtype)
        for position in range(end - start):
            column = 16 * (start // 16 + user) + place_of(position)
            codes_t[:, :, column] = codes[start + position]
        begins = 16 * (start // 16 + user)
        owned[1][begins : begins - (start - end) // 16 * 16] = True
        owned[0][start:end] = True
    return Expected(
        codes=codes,
        codes_t=codes_t,
        scale_inv=scale_inv,
        owns_row=owned[0],
        owns_column=owned[1],
        owns_slot=owned[2],
    )
