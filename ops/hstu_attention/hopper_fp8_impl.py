"""Launches of the FP8 kernels for Hopper: tiles, descriptors, which kernels take which head dim."""

from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ops.hstu_attention import (
    hopper_fp8_keys,
    hopper_fp8_keys_long,
    hopper_fp8_keys_wide,
    hopper_fp8_rows,
    hopper_fp8_rows_wide,
)
from ops.hstu_attention.fp8_operands import Fp8Operand
from ops.hstu_attention.hopper_fp8_forward import forward_kernel
from ops.hstu_attention.triton_kernels import Rule
from ops.triton_launch import launch

_GROUP_ROWS = 64  # rows that a warpgroup owns
_BLOCK_ROWS = 2 * _GROUP_ROWS
_WIDE = 256
# head dim: keys of a tile, parts of O's columns, stages of k and v
FORWARD_TILES = {64: (128, 1, 4), 128: (128, 1, 4), _WIDE: (64, 4, 3)}
# its mask needs registers, and narrow tiles waste less of a window
WINDOW_TILES = {**FORWARD_TILES, 128: (64, 1, 8)}
# rows of a user that dK and dV of head dim 256 are summed over in BF16: 1.36 times as fast. Where
# rows of dO share a part as large as what they differ by, dV's error is .0130 for .0101 with 8192
# rows and .062 for .010 with 32,768 (simulated), beside .043 of rows that share nothing
LONGEST_IN_BF16 = 8192
_GLUON_DTYPES = {torch.float8_e4m3fn: gl.float8e4nv, torch.float8_e5m2: gl.float8e5}

Structure = Callable[[int], dict[str, Any]]
"""The arguments that describe the batch, with a schedule of blocks of so many rows."""


def launch_forward(
    q: Fp8Operand,
    k: Fp8Operand,
    v: Fp8Operand,
    *,
    out: Tensor,
    structure: Structure,
    rule: Rule,
    scaled: bool,
    tiles: tuple[int, int, int] | None = None,
) -> None:
    """Fill out (T, H, A), any strides with contiguous rows.

    Args:
        q: E4M3, as k and v; head dim 64, 128 or 256. Only v's transposed codes are read.
        k: as q.
        v: as q.
        out: BF16 or FP16.
        structure: see `Structure`; holds weight_factor, the power of two of weights without scales.
        rule: without biases.
        scaled: False: the scales of q, k and v are 1 and not read.
        tiles: instead of those of the tables above, for measurements.
    """
    num_heads, width = q.codes.shape[1:]
    table = WINDOW_TILES if rule.has_window else FORWARD_TILES
    keys, parts, stages = tiles or table[width]
    arguments = {
        **structure(_BLOCK_ROWS),
        "q_desc": _rows_descriptor(q.codes, _GROUP_ROWS),
        "k_desc": _rows_descriptor(k.codes, keys),
        "vt_desc": _columns_descriptor(v.codes_t, width // parts, keys),
        **_scales(q=q, k=k, v=v),
        "out_ptr": out,
        "out_stride": out.stride(0),
        "out_head_stride": out.stride(1),
        "num_heads": num_heads,
        "A": width,
        "KEYS": keys,
        "PARTS": parts,
        "STAGES": stages,
        "SCALED": scaled,
        "RULE": rule,
    }
    _launch(forward_kernel, arguments, out.device)


def launch_backward(
    q: Fp8Operand,
    k: Fp8Operand,
    v: Fp8Operand,
    do: Fp8Operand,
    *,
    grads: tuple[Tensor, Tensor, Tensor],
    structure: Structure,
    rule: Rule,
    scaled: bool,
    longest: int,
) -> None:
    """Fill dQ, dK and dV, contiguous (T, H, A), BF16 or FP16.

    Args:
        q: as in `launch_forward`; the transposed codes of all but v are read.
        k: as q.
        v: as q.
        do: E4M3 or E5M2; its scales are always read.
        grads: dQ, dK, dV.
        structure: as in `launch_forward`; holds slope_factor too.
        rule: as in `launch_forward`.
        scaled: as in `launch_forward`.
        longest: no user has more rows.
    """
    num_heads, width = q.codes.shape[1:]
    is_wide = width == _WIDE
    arguments = {
        **_scales(q=q, k=k, v=v, do=do),
        **dict(zip(("dq_ptr", "dk_ptr", "dv_ptr"), grads, strict=True)),
        "num_heads": num_heads,
        "A": width,
        "SCALED": scaled,
        "RULE": rule,
    }
    operands = {"q": q, "k": k, "v": v, "do": do}
    keys_module = hopper_fp8_keys
    if is_wide:
        is_long = longest > LONGEST_IN_BF16
        keys_module = hopper_fp8_keys_long if is_long else hopper_fp8_keys_wide
    rows_module = hopper_fp8_rows_wide if is_wide else hopper_fp8_rows
    for module, kernel in (
        (keys_module, keys_module.keys_kernel),
        (rows_module, rows_module.rows_kernel),
    ):
        descriptors = _descriptors(module, operands)
        batch = structure(module.BLOCK)
        _launch(
            kernel, {**batch, **arguments, **descriptors, "STAGES": module.STAGES}, grads[0].device
        )


def _launch(kernel: Any, arguments: dict[str, Any], device: torch.device) -> None:
    arguments["SCALE_IS_POINTER"] = isinstance(arguments["scaling_seqlen"], Tensor)
    launch(kernel, (_num_multiprocessors(device),), arguments, num_warps=4)


def _scales(**operands: Fp8Operand) -> dict[str, Tensor]:
    return {f"{name}_scale_ptr": operand.scale_inv for name, operand in operands.items()}


def _descriptors(
    module: ModuleType, operands: dict[str, Fp8Operand]
) -> dict[str, TensorDescriptor]:
    """The descriptors that a kernel asks for in its BOXES: of codes, and, with a t, transposed."""
    descriptors = {}
    for name, box in module.BOXES.items():
        if name in operands:
            found = _rows_descriptor(operands[name].codes, box)
        else:
            operand = operands[name.removesuffix("t")]
            found = _columns_descriptor(operand.codes_t, operand.codes.shape[2], box)
        descriptors[f"{name}_desc"] = found
    return descriptors


def _rows_descriptor(codes_THA: Tensor, box_rows: int) -> TensorDescriptor:
    """Of codes as (T, H A), in boxes of some rows and a head's columns."""
    num_rows, num_heads, width = codes_THA.shape
    return _descriptor(codes_THA, (num_rows, num_heads * width), (box_rows, width))


def _columns_descriptor(
    codes_t: Tensor | None, box_rows: int, box_columns: int
) -> TensorDescriptor:
    """Of transposed codes as (H A, columns)."""
    assert codes_t is not None
    num_heads, width, num_columns = codes_t.shape
    return _descriptor(codes_t, (num_heads * width, num_columns), (box_rows, box_columns))


def _descriptor(codes: Tensor, shape: tuple[int, int], box: tuple[int, int]) -> TensorDescriptor:
    descriptor = object.__new__(TensorDescriptor)
    checked = _checked_descriptor(codes.dtype, shape[1], box)
    descriptor.__dict__.update(checked.__dict__, base=codes, shape=list(shape))
    return descriptor


@lru_cache(maxsize=64)
def _checked_descriptor(
    dtype: torch.dtype, num_columns: int, box: tuple[int, int]
) -> TensorDescriptor:
    """A descriptor of no rows: Triton would check it each time, at a launch's cost for a few."""
    layout = gl.NVMMASharedLayout.get_default_for(list(box), _GLUON_DTYPES[dtype])
    nothing = torch.empty(0, num_columns, dtype=dtype)
    return TensorDescriptor(nothing, [1, num_columns], [num_columns, 1], list(box), layout)


@lru_cache(maxsize=64)
def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
