"""SiLU with the projection's bias, and the gradient of its four parts, in Triton.

Bytes, for rows of b bytes: 2 b a row forward; backward reads the pre-activation and the four
gradients and writes the projection's gradient: 3 b. Where u is left to the gate, its quarter is
neither read nor written forward, and only its gradient is moved backward.

The bias gradient is the column sum of what the backward writes anyway: persistent programs keep it
in FP32 and write partial sums, so it costs no pass of its own and is bit-equal from run to run.
Arithmetic in FP32. First derivatives only.
"""

# ruff: noqa: ANN001, ANN201  a kernel's arguments are device values without a Python type

import math
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ops.norm.triton_rows import INTERPRETED, check_rows, num_processors
from ops.norm.triton_sums import sum_partials
from ops.triton_launch import cdiv, launch, next_power_of_2

if TYPE_CHECKING:
    from ops.silu_split.triton_fp8 import GradientTarget

_MAX_COLUMNS = 256  # of a tile
_TILE_BYTES = 4096  # 16 entries a thread in half precision
_IN_INTERPRETER = tl.constexpr(INTERPRETED)
_PROGRAMS = 4  # of the persistent backward, a multiprocessor


def silu_split(
    uvqk_TX: Tensor,
    num_heads: int,
    *,
    attention_dim: int,
    linear_dim: int,
    bias_X: Tensor | None,
    activates_u: bool,
    gradient_target: "GradientTarget | None" = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return u, v, q, k of silu(uvqk + bias); see `ops.silu_split.silu_split`."""
    check_rows("silu_split", uvqk_TX, 1)  # columns are cut into tiles, so any width runs
    return _SiluSplit.apply(
        uvqk_TX, bias_X, num_heads, attention_dim, linear_dim, activates_u, gradient_target
    )


class _SiluSplit(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        uvqk: Tensor,
        bias: Tensor | None,
        num_heads: int,
        attention_dim: int,
        linear_dim: int,
        activates_u: bool,
        gradient_target: "GradientTarget | None",
    ) -> tuple[Tensor, ...]:
        uvqk = uvqk.contiguous()
        ctx.save_for_backward(uvqk, bias)
        ctx.dims = (num_heads, linear_dim, attention_dim)
        ctx.activates_u = activates_u
        ctx.gradient_target = gradient_target
        ctx.set_materialize_grads(False)
        num_rows = uvqk.shape[0]
        widths = [linear_dim, linear_dim, attention_dim, attention_dim]
        skipped = 0 if activates_u else linear_dim
        width = num_heads * (sum(widths) - skipped)
        activated = uvqk.new_empty((num_rows, width))
        columns = min(512, next_power_of_2(width))
        rows = _rows(columns, uvqk)
        if num_rows:
            launch(
                _forward_kernel,
                (cdiv(num_rows, rows) * cdiv(width, columns),),
                {
                    "uvqk_ptr": uvqk,
                    "bias_ptr": bias,
                    "out_ptr": activated,
                    "num_rows": num_rows,
                    "H": num_heads,
                    "HEAD": sum(widths),
                    "SKIPPED": skipped,
                    "ROWS": rows,
                    "COLS": columns,
                },
                num_warps=4,
            )
        heads = activated.view(num_rows, num_heads, sum(widths) - skipped)
        if activates_u:
            return heads.split(widths, dim=-1)
        u = uvqk.detach().view(num_rows, num_heads, sum(widths))[..., :linear_dim]
        return u, *heads.split(widths[1:], dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        uvqk, bias = ctx.saved_tensors
        num_heads, linear_dim, attention_dim = ctx.dims
        widths = (linear_dim, linear_dim, attention_dim, attention_dim)
        parts = [
            _walkable(grad, uvqk, num_heads, width)
            for grad, width in zip(grads, widths, strict=True)
        ]
        target = ctx.gradient_target
        if target is not None and uvqk.shape[0]:
            from ops.silu_split.triton_fp8 import silu_backward_cast

            duvqk, dbias = silu_backward_cast(
                uvqk, bias, parts, ctx.dims, activates_u=ctx.activates_u, target=target
            )
        else:
            duvqk, dbias = _launch_backward(uvqk, bias, parts, ctx.dims, ctx.activates_u)
        return duvqk, dbias, None, None, None, None, None


def _launch_backward(
    uvqk: Tensor,
    bias: Tensor | None,
    parts: list[Tensor],
    dims: tuple[int, int, int],
    activates_u: bool,
) -> tuple[Tensor, Tensor | None]:
    num_heads, linear_dim, attention_dim = dims
    num_rows, width = uvqk.shape
    duvqk = torch.empty_like(uvqk)
    if not num_rows:
        return duvqk, None if bias is None else torch.zeros_like(bias)
    columns = _columns(linear_dim, attention_dim)
    rows = _rows(columns, uvqk)
    num_tiles = cdiv(num_rows, rows)
    blocks = 2 * num_heads * sum(cdiv(dim, columns) for dim in (linear_dim, attention_dim))
    chunks = max(1, min(num_tiles, _PROGRAMS * num_processors(uvqk.device) // blocks))
    partial = None
    if bias is not None:
        partial = torch.empty((chunks, width), dtype=torch.float32, device=uvqk.device)
    arguments = {
        "uvqk_ptr": uvqk,
        "bias_ptr": bias,
        "out_ptr": duvqk,
        "partial_ptr": partial,
        "num_rows": num_rows,
        "num_tiles": num_tiles,
        "num_chunks": chunks,
        "H": num_heads,
        "V": linear_dim,
        "A": attention_dim,
        "ROWS": rows,
        "COLS": columns,
        "ACTIVATES_U": activates_u,
        "STAGES": 1 if INTERPRETED else 4,
    }
    for name, part in zip("uvqk", parts, strict=True):
        arguments[f"d{name}_ptr"] = part
        arguments[f"{name}_stride"], arguments[f"{name}_head_stride"], _ = part.stride()
    launch(_backward_kernel, (chunks * blocks,), arguments, num_warps=4)
    if bias is None or partial is None:
        return duvqk, None
    return duvqk, sum_partials(partial, dtype=bias.dtype)


def _columns(linear_dim: int, attention_dim: int) -> int:
    """Width of the backward's tiles: one that cuts both parts evenly where it is not too narrow."""
    common = math.gcd(linear_dim, attention_dim)
    even = min(_MAX_COLUMNS, common & -common)
    if even >= 32:
        return even
    return min(_MAX_COLUMNS, max(16, next_power_of_2(max(linear_dim, attention_dim))))


def _rows(columns: int, uvqk: Tensor) -> int:
    """Rows of a tile."""
    return 16 if INTERPRETED else max(1, _TILE_BYTES // (columns * uvqk.element_size()))


def _walkable(grad: Tensor | None, uvqk: Tensor, num_heads: int, width: int) -> Tensor:
    """The gradient of one part with unit stride in its last dimension; zeros for an absent one."""
    if grad is None:
        return uvqk.new_zeros(width).expand(uvqk.shape[0], num_heads, width)
    return grad if grad.stride(2) == 1 or width == 1 else grad.contiguous()


@triton.jit
def sigmoid(x, SCALE: tl.constexpr = 1.0):
    """SCALE / (1 + exp(-x)) to 2**-21; four instructions, the scale at no cost.

    exp and a division that care for subnormals take 15.
    """
    if _IN_INTERPRETER:
        return SCALE / (1.0 + tl.exp(-x))
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t;"
            " fma.rn.f32 t, t, $2, $2; rcp.approx.ftz.f32 $0, t; }",  # 1 / (2**(-x / ln 2) + 1)
            "=f,f,f",
            [x, tl.full([], 1.0 / SCALE, tl.float32)],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )


@triton.jit(do_not_specialize=["num_rows"])
def _forward_kernel(
    uvqk_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    H: tl.constexpr,
    HEAD: tl.constexpr,
    SKIPPED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """A tile of the output, which lacks the first SKIPPED of each head's HEAD columns."""
    WIDTH: tl.constexpr = HEAD - SKIPPED
    num_column_tiles: tl.constexpr = (H * WIDTH + COLS - 1) // COLS
    tile = tl.program_id(0)
    row = (tile // num_column_tiles) * ROWS + tl.arange(0, ROWS)[:, None]
    col = (tile % num_column_tiles) * COLS + tl.arange(0, COLS)[None, :]
    mask = row < num_rows
    if (H * WIDTH) % COLS != 0:
        mask = mask & (col < H * WIDTH)
    own = col
    if SKIPPED > 0:
        own = (col // WIDTH) * HEAD + SKIPPED + col % WIDTH
    row = row.to(tl.int64)
    x = tl.load(uvqk_ptr + row * (H * HEAD) + own, mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + own, mask=col < H * WIDTH, other=0.0).to(tl.float32)
    silu = (x * sigmoid(x)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * (H * WIDTH) + col, silu, mask=mask)


@triton.jit(do_not_specialize=["num_rows", "num_tiles", "num_chunks"])
def _backward_kernel(
    uvqk_ptr,
    bias_ptr,
    du_ptr,
    dv_ptr,
    dq_ptr,
    dk_ptr,
    out_ptr,
    partial_ptr,
    num_rows,
    num_tiles,
    num_chunks,
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
    ACTIVATES_U: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A program owns a column tile of one part of one head and row tiles chunk, chunk + chunks, ...

    Column tiles are numbered head by head, [u | v | q | k] inside, like the columns themselves.
    """
    v_tiles: tl.constexpr = (V + COLS - 1) // COLS
    a_tiles: tl.constexpr = (A + COLS - 1) // COLS
    head_tiles: tl.constexpr = 2 * (v_tiles + a_tiles)
    X: tl.constexpr = H * 2 * (V + A)
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

    col = part_tile * COLS + tl.arange(0, COLS)
    is_inside = col < width
    own = head * (2 * (V + A)) + part_start + col
    grad_ptr += head.to(tl.int64) * head_stride
    shift = tl.full([1, COLS], 0.0, tl.float32)
    if bias_ptr is not None:
        shift = tl.load(bias_ptr + own, mask=is_inside, other=0.0).to(tl.float32)[None, :]
    sums = tl.full([ROWS, COLS], 0.0, tl.float32)
    for tile in tl.range(chunk, num_tiles, num_chunks, num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)[:, None]
        mask = row < num_rows
        if (V % COLS != 0) or (A % COLS != 0):
            mask = mask & is_inside[None, :]
        row = row.to(tl.int64)
        wanted = mask if ACTIVATES_U else mask & (tile_of_head >= v_tiles)
        x = tl.load(uvqk_ptr + row * X + own[None, :], mask=wanted, other=0.0)
        x = x.to(tl.float32) + shift
        grad = tl.load(grad_ptr + row * stride + col[None, :], mask=mask, other=0.0)
        gate = sigmoid(x)
        slope = gate + x * gate * (1.0 - gate)
        if not ACTIVATES_U:
            slope = tl.where(tile_of_head >= v_tiles, slope, 1.0)
        dx = grad.to(tl.float32) * slope
        sums += dx
        dx = dx.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row * X + own[None, :], dx, mask=mask)
    if partial_ptr is not None:
        sums = tl.reduce(sums, 0, tl.standard._sum_combine)
        tl.store(partial_ptr + chunk.to(tl.int64) * X + own, sums, mask=is_inside)
