"""SiLU's backward pass straight to FP8: the projection's gradient in both orientations.

Bytes, for rows of b bytes: 2 b a row read (the pre-activation, the four gradients), 1 written an
orientation; the bias gradient and the maximum come along. The gradient is rounded to the dtype of
the rows before it is scaled, so the result is that of the plain backward pass followed by
`cast_rows`.
"""

# ruff: noqa: ANN001  a kernel's arguments are device values without a Python type

import math
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.norm.triton_rows import num_processors
from ops.norm.triton_sums import sum_partials
from ops.quantize.operand import CastRule, Fp8Operand
from ops.quantize.triton_cast import INTERPRETED, begin, emit, finish, load_four
from ops.quantize.triton_impl import Tuning, empty_operand, num_row_tiles, run_cast
from ops.silu_split.triton_impl import sigmoid
from ops.triton_launch import cdiv, next_power_of_2

TUNING = Tuning(rows=128, columns=64, warps=16, programs=2, registers=64, stages=1)


class GradientTarget(Protocol):
    """Where the backward pass leaves the projection's gradient instead of returning it.

    It returns `placeholder` as gradient, for the shape; whoever made the target recognises it.
    """

    rule: CastRule
    row_multiple: int
    wants_transposed: bool
    wants_plain: bool

    def put(self, operand: Fp8Operand, plain_TX: Tensor | None, *, like_TX: Tensor) -> Tensor:
        """Take the FP8 gradient, and the plain one if wanted; return a placeholder for it."""


def silu_backward_cast(
    uvqk_TX: Tensor,
    bias_X: Tensor | None,
    parts: list[Tensor],
    dims: tuple[int, int, int],
    *,
    activates_u: bool,
    target: GradientTarget,
) -> tuple[Tensor, Tensor | None]:
    """Return the placeholder and the bias gradient; the gradient itself goes to `target`.

    Args:
        uvqk_TX: contiguous, T at least 1, X a multiple of 16.
        bias_X: of the projection, or None.
        parts: gradients of u, v, q and k, unit stride in the last dimension.
        dims: H, V, A.
        activates_u: as in `silu_split`.
        target: rule, orientations wanted, taker.
    """
    num_heads, linear_dim, attention_dim = dims
    num_rows, width = uvqk_TX.shape
    rule = target.rule
    out = empty_operand(
        num_rows,
        width,
        rule,
        device=uvqk_TX.device,
        row_multiple=target.row_multiple,
        wants_transposed=target.wants_transposed,
    )
    plain = torch.empty_like(uvqk_TX) if target.wants_plain else None
    tuning = TUNING
    columns = tile_columns(linear_dim, attention_dim, at_most=tuning.columns)
    rows = min(256, tuning.rows * tuning.columns // columns)
    num_tiles = num_row_tiles(out, num_rows, rows)
    blocks = 2 * num_heads * sum(cdiv(dim, columns) for dim in (linear_dim, attention_dim))
    chunks = max(1, min(num_tiles, tuning.programs * num_processors(uvqk_TX.device) // blocks))
    partial = None
    if bias_X is not None:
        partial = torch.empty((chunks, width), dtype=torch.float32, device=uvqk_TX.device)
    arguments: dict[str, object] = {
        "uvqk_ptr": uvqk_TX,
        "bias_ptr": bias_X,
        "plain_ptr": plain,
        "sums_ptr": partial,
        "num_rows": num_rows,
        "num_tiles": num_tiles,
        "num_chunks": chunks,
        "H": num_heads,
        "V": linear_dim,
        "A": attention_dim,
        "ROWS": rows,
        "COLS": columns,
        "STAGES": 1 if INTERPRETED else tuning.stages,
        "ACTIVATES_U": activates_u,
    }
    for name, part in zip("uvqk", parts, strict=True):
        arguments[f"d{name}_ptr"] = part
        arguments[f"{name}_stride"], arguments[f"{name}_head_stride"], _ = part.stride()
    run_cast(_backward_cast_kernel, chunks * blocks, arguments, rule, out, tuning)
    placeholder = target.put(out, plain, like_TX=uvqk_TX)
    if partial is None or bias_X is None:
        return placeholder, None
    return placeholder, sum_partials(partial, dtype=bias_X.dtype)


def tile_columns(linear_dim: int, attention_dim: int, *, at_most: int) -> int:
    """Return the width of a tile: one that cuts both parts evenly where it is not too narrow."""
    common = math.gcd(linear_dim, attention_dim)
    even = min(at_most, common & -common)
    if even >= 32:
        return even
    return min(at_most, max(16, next_power_of_2(max(linear_dim, attention_dim))))


@triton.jit
def _gradient(x, grad, shift, has_slope, ACTIVATES_U: tl.constexpr):
    """Gradient of a quarter of the projection, FP32. has_slope: SiLU was applied here."""
    x = x.to(tl.float32) + shift
    gate = sigmoid(x)
    slope = gate + x * gate * (1.0 - gate)
    if not ACTIVATES_U:
        slope = tl.where(has_slope, slope, 1.0)
    return grad.to(tl.float32) * slope


@triton.jit(
    do_not_specialize=["num_rows", "num_tiles", "num_chunks", "num_maxima"],
    do_not_specialize_on_alignment=["scale_ptr", "amax_ptr"],  # entries of one tensor
)
def _backward_cast_kernel(
    uvqk_ptr,
    bias_ptr,
    du_ptr,
    dv_ptr,
    dq_ptr,
    dk_ptr,
    plain_ptr,
    sums_ptr,
    scale_ptr,
    maxima_ptr,
    amax_ptr,
    measured_ptr,
    values_ptr,
    transposed_ptr,
    scale_inv_ptr,
    num_rows,
    num_tiles,
    num_chunks,
    num_maxima,
    padded,
    u_stride,
    u_head_stride,
    v_stride,
    v_head_stride,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    H: tl.constexpr,
    V: tl.constexpr,
    A: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STAGES: tl.constexpr,
    ACTIVATES_U: tl.constexpr,
    FP8: tl.constexpr,
    MARGIN: tl.constexpr,
):
    """A program owns a column tile of one part of one head and row tiles chunk, chunk + chunks, ...

    Column tiles are numbered head by head, [u | v | q | k] inside, like the columns themselves.
    measured_ptr: leave a maximum there and write nothing else.
    """
    v_tiles: tl.constexpr = (V + COLS - 1) // COLS
    a_tiles: tl.constexpr = (A + COLS - 1) // COLS
    head_tiles: tl.constexpr = 2 * (v_tiles + a_tiles)
    X: tl.constexpr = H * 2 * (V + A)
    QUARTER: tl.constexpr = ROWS // 4
    IS_EVEN: tl.constexpr = V % COLS == 0 and A % COLS == 0
    WRITES: tl.constexpr = measured_ptr is None
    TRACKS: tl.constexpr = not WRITES or (maxima_ptr is None and amax_ptr is not None)
    block = tl.program_id(0) % (H * head_tiles)
    chunk = tl.program_id(0) // (H * head_tiles)
    head = block // head_tiles
    tile_of_head = block % head_tiles

    grad_ptr, stride, head_stride = du_ptr, u_stride, u_head_stride
    part_start, part_tile, width = tile_of_head * 0, tile_of_head, tile_of_head * 0 + V
    if tile_of_head >= v_tiles:
        grad_ptr, stride, head_stride = dv_ptr, v_stride, v_head_stride
        part_start, part_tile = tile_of_head * 0 + V, tile_of_head - v_tiles
    if tile_of_head >= 2 * v_tiles:
        grad_ptr, stride, head_stride = dq_ptr, q_stride, q_head_stride
        part_start, part_tile = tile_of_head * 0 + 2 * V, tile_of_head - 2 * v_tiles
        width = tile_of_head * 0 + A
    if tile_of_head >= 2 * v_tiles + a_tiles:
        grad_ptr, stride, head_stride = dk_ptr, k_stride, k_head_stride
        part_start = tile_of_head * 0 + 2 * V + A
        part_tile = tile_of_head - 2 * v_tiles - a_tiles
    has_slope = tile_of_head >= v_tiles

    col = part_tile * COLS + tl.arange(0, COLS)
    inside = col < width
    own = head * (2 * (V + A)) + part_start + col
    grad_ptr += head.to(tl.int64) * head_stride
    shift = tl.full([1, COLS], 0.0, tl.float32)
    if bias_ptr is not None:
        shift = tl.load(bias_ptr + own, mask=inside, other=0.0).to(tl.float32)[None, :]
    sums = tl.full([QUARTER, COLS], 0.0, tl.float32)
    maxima = tl.full([QUARTER, COLS // 4], 0.0, tl.float32)
    scale = None
    if WRITES:
        scale = begin(scale_ptr, maxima_ptr, num_maxima, amax_ptr, scale_inv_ptr, FP8, MARGIN)
    for tile in tl.range(chunk, num_tiles, num_chunks, num_stages=STAGES):
        word = tile * QUARTER + tl.arange(0, QUARTER)
        row = 4 * word
        wanted = num_rows
        if not ACTIVATES_U:  # the pre-activation of u is not read
            wanted = tl.where(has_slope, num_rows, 0)
        x0, x1, x2, x3 = load_four(uvqk_ptr, row, own, X, inside, wanted, IS_EVEN)
        grad0, grad1, grad2, grad3 = load_four(
            grad_ptr, row, col, stride, inside, num_rows, IS_EVEN
        )
        x0 = _gradient(x0, grad0, shift, has_slope, ACTIVATES_U)
        x1 = _gradient(x1, grad1, shift, has_slope, ACTIVATES_U)
        x2 = _gradient(x2, grad2, shift, has_slope, ACTIVATES_U)
        x3 = _gradient(x3, grad3, shift, has_slope, ACTIVATES_U)
        if WRITES and sums_ptr is not None:
            sums += (x0 + x1) + (x2 + x3)
        maxima = emit(
            x0.to(uvqk_ptr.dtype.element_ty).to(tl.float32),
            x1.to(uvqk_ptr.dtype.element_ty).to(tl.float32),
            x2.to(uvqk_ptr.dtype.element_ty).to(tl.float32),
            x3.to(uvqk_ptr.dtype.element_ty).to(tl.float32),
            maxima,
            scale,
            plain_ptr,
            values_ptr,
            transposed_ptr,
            word,
            own,
            inside,
            num_rows,
            padded,
            X,
            IS_EVEN,
            TRACKS,
            WRITES,
        )
    finish(maxima, amax_ptr, measured_ptr, TRACKS)
    if WRITES and sums_ptr is not None:
        sums = tl.reduce(sums, 0, tl.standard._sum_combine)
        tl.store(sums_ptr + chunk.to(tl.int64) * X + own, sums, mask=inside)
