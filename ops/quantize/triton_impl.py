"""Rows to FP8 in Triton, one scale a tensor: both orientations, maximum, column sums in one pass.

Bytes an entry of b bytes: b read, 1 written for each orientation asked for. A scale that is known
before (delayed) makes one launch; one of the present maximum costs a pass that only reads.
"""

# ruff: noqa: ANN001  a kernel's arguments are device values without a Python type

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.norm.triton_rows import num_processors
from ops.norm.triton_sums import sum_partials
from ops.quantize.operand import CastRule, Fp8Operand
from ops.quantize.triton_cast import INTERPRETED, MAX_PROGRAMS, begin, emit, finish, load_four
from ops.triton_launch import cdiv, launch, next_power_of_2

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Tile of a casting kernel and what it runs with."""

    rows: int = 64
    """A multiple of 64 or so: segments of the transposed copy are this many bytes."""
    columns: int = 128
    """At most."""
    warps: int = 8
    programs: int = 4
    """A multiprocessor."""
    registers: int | None = None
    """A thread may use."""
    stages: int = 3
    """Tiles in flight, the one that is computed included."""


TUNING = Tuning(columns=64, warps=4, programs=5, stages=1)


def cast_rows(
    x_TK: Tensor,
    rule: CastRule,
    *,
    row_multiple: int = 16,
    wants_values: bool = True,
    wants_transposed: bool = True,
    sums_dtype: torch.dtype | None = None,
) -> tuple[Fp8Operand, Tensor | None]:
    """Return rows in FP8 and, in `sums_dtype` unless that is None, their sums by column (K,).

    Args:
        x_TK: contiguous, T at least 1, float32, bfloat16 or float16.
        rule: scale and record.
        row_multiple: of P, itself a multiple of 16.
        wants_values, wants_transposed: which orientations.

    Raises:
        NotImplementedError: a dtype, or more rows, than the kernel has.
    """
    num_rows, width = x_TK.shape
    check_castable(x_TK)
    out = empty_operand(
        num_rows,
        width,
        rule,
        device=x_TK.device,
        row_multiple=row_multiple,
        wants_values=wants_values,
        wants_transposed=wants_transposed,
    )
    tuning = TUNING
    rows, columns = tuning.rows, min(tuning.columns, max(16, next_power_of_2(width)))
    blocks, num_tiles = cdiv(width, columns), num_row_tiles(out, num_rows, rows)
    chunks = max(1, min(num_tiles, tuning.programs * num_processors(x_TK.device) // blocks))
    partial = None
    if sums_dtype is not None:
        partial = torch.empty((chunks, width), dtype=torch.float32, device=x_TK.device)
    run_cast(
        _cast_kernel,
        chunks * blocks,
        {
            "x_ptr": x_TK,
            "sums_ptr": partial,
            "num_rows": num_rows,
            "num_tiles": num_tiles,
            "num_chunks": chunks,
            "K": width,
            "ROWS": rows,
            "COLS": columns,
            "STAGES": 1 if INTERPRETED else tuning.stages,
        },
        rule,
        out,
        tuning,
    )
    if partial is None or sums_dtype is None:
        return out, None
    return out, sum_partials(partial, dtype=sums_dtype)


def check_castable(x: Tensor) -> None:
    """Raise NotImplementedError for rows that the kernels do not have."""
    if x.dtype not in _DTYPES:
        raise NotImplementedError(
            f"quantising in Triton: the dtype must be float32, bfloat16 or float16, got {x.dtype}"
        )
    if x.shape[0] > 2**30:
        raise NotImplementedError(
            f"quantising in Triton: at most 2**30 rows, got {x.shape[0]}; use smaller batches"
        )


def empty_operand(
    num_rows: int,
    width: int,
    rule: CastRule,
    *,
    device: torch.device,
    row_multiple: int = 16,
    wants_values: bool = True,
    wants_transposed: bool = True,
) -> Fp8Operand:
    """Return unwritten memory for rows (num_rows, width)."""
    dtype = rule.fp8_dtype
    padded = -(-num_rows // row_multiple) * row_multiple
    return Fp8Operand(
        torch.empty((num_rows, width), dtype=dtype, device=device) if wants_values else None,
        torch.empty((width, padded), dtype=dtype, device=device) if wants_transposed else None,
        torch.empty(1, dtype=torch.float32, device=device),
    )


def num_row_tiles(out: Fp8Operand, num_rows: int, rows: int) -> int:
    """Return how many tiles of `rows` rows reach the end of the longer orientation."""
    return cdiv(num_rows if out.transposed is None else out.transposed.shape[1], rows)


def run_cast(
    kernel: object,
    programs: int,
    arguments: dict[str, object],
    rule: CastRule,
    out: Fp8Operand,
    tuning: Tuning,
) -> None:
    """Launch a kernel that casts: once with a known scale, else first to measure, then to write.

    Args:
        kernel: takes `arguments` and scale_ptr, maxima_ptr, num_maxima, amax_ptr, measured_ptr,
            values_ptr, transposed_ptr, padded, scale_inv_ptr, FP8 and MARGIN.
        programs: grid, at most MAX_PROGRAMS where a scale has to be measured.
        out: written.
        tuning: warps and registers.
    """
    options = {"num_warps": tuning.warps, "maxnreg": tuning.registers}
    maxima = None
    target = out.scale_inv
    arguments = {
        **arguments,
        "scale_ptr": rule.scale,
        "maxima_ptr": None,
        "num_maxima": programs,
        "amax_ptr": rule.amax,
        "measured_ptr": None,
        "values_ptr": out.values,
        "transposed_ptr": out.transposed,
        "padded": 0 if out.transposed is None else out.transposed.shape[1],
        "scale_inv_ptr": target,
        "FP8": TRITON_FP8[rule.fp8_dtype],
        "MARGIN": rule.margin,
    }
    if rule.scale is None:
        assert programs <= MAX_PROGRAMS
        maxima = torch.empty(programs, dtype=torch.float32, device=target.device)
        launch(kernel, (programs,), {**arguments, "measured_ptr": maxima}, **options)
        arguments["maxima_ptr"] = maxima
    launch(kernel, (programs,), arguments, **options)


TRITON_FP8 = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


@triton.jit(
    do_not_specialize=["num_rows", "num_tiles", "num_chunks", "num_maxima"],
    do_not_specialize_on_alignment=["scale_ptr", "amax_ptr"],  # entries of one tensor
)
def _cast_kernel(
    x_ptr,
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
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STAGES: tl.constexpr,
    FP8: tl.constexpr,
    MARGIN: tl.constexpr,
):
    """A program owns a column tile and the row tiles chunk, chunk + num_chunks, ...

    measured_ptr: leave a maximum there and write nothing else.
    """
    NUM_BLOCKS: tl.constexpr = (K + COLS - 1) // COLS
    QUARTER: tl.constexpr = ROWS // 4
    IS_EVEN: tl.constexpr = K % COLS == 0
    WRITES: tl.constexpr = measured_ptr is None
    TRACKS: tl.constexpr = not WRITES or (maxima_ptr is None and amax_ptr is not None)
    col = (tl.program_id(0) % NUM_BLOCKS) * COLS + tl.arange(0, COLS)
    chunk = tl.program_id(0) // NUM_BLOCKS
    inside = col < K
    maxima = tl.full([QUARTER, COLS // 4], 0.0, tl.float32)
    sums = tl.full([QUARTER, COLS], 0.0, tl.float32)
    scale = None
    if WRITES:
        scale = begin(scale_ptr, maxima_ptr, num_maxima, amax_ptr, scale_inv_ptr, FP8, MARGIN)
    for tile in tl.range(chunk, num_tiles, num_chunks, num_stages=STAGES):
        word = tile * QUARTER + tl.arange(0, QUARTER)
        row = 4 * word
        x0, x1, x2, x3 = load_four(x_ptr, row, col, K, inside, num_rows, IS_EVEN)
        x0, x1, x2, x3 = x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32)
        if WRITES and sums_ptr is not None:
            sums += (x0 + x1) + (x2 + x3)
        maxima = emit(
            x0,
            x1,
            x2,
            x3,
            maxima,
            scale,
            None,
            values_ptr,
            transposed_ptr,
            word,
            col,
            inside,
            num_rows,
            padded,
            K,
            IS_EVEN,
            TRACKS,
            WRITES,
        )
    finish(maxima, amax_ptr, measured_ptr, TRACKS)
    if WRITES and sums_ptr is not None:
        sums = tl.reduce(sums, 0, tl.standard._sum_combine)
        tl.store(sums_ptr + chunk.to(tl.int64) * K + col, sums, mask=inside)
